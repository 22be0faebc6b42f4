"""Keep the frozen input embeddings under an adapter in host memory, and copy the rows of each micro-batch to the GPU.

A step reads a few thousand rows of the table: 32 MiB of 1 GiB for 4,096 tokens of an 8B Llama. The rows are the same,
so the curve has the same bits.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ftcli.models.structure import base_model_of, is_of_transformers
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


HINT = "delete model.embeddings_on_host"


def keep_embeddings_on_host(model: nn.Module, recipe: Recipe) -> list[str]:
    """Move the input embeddings of a model to the host, if `model.embeddings_on_host` is true.

    The module keeps its name. Its weight is no parameter any more, so nothing moves it, shards it or sends it.

    Args:
        model: The model with its adapter, on the device of this process, not yet prepared.
        recipe: The recipe, in which nothing is left to `auto`.

    Returns:
        One line for the log; none if nothing is moved.

    Raises:
        InputError: The embeddings are trained or shared, or do more than a lookup.
    """
    if recipe.model.embeddings_on_host is not True or recipe.adapter.type == "none":
        return []
    embeddings = _plain_embeddings(model)
    table, device = embeddings.weight.detach().cpu(), embeddings.weight.device
    del embeddings.weight
    embeddings.weight = table  # a plain tensor, no parameter
    embeddings.forward = HostLookup(table, device)
    return [f"embeddings on the host: {table.nbytes / 1e9:.2f} GB; the rows of each micro-batch are copied to the GPU"]


def movable_bytes(model: nn.Module, recipe: Recipe) -> int:
    """Return the bytes of a model's weights that `keep_embeddings_on_host` can move to the host.

    Args:
        model: The model with its adapter.
        recipe: The recipe.

    Raises:
        InputError: The recipe asks for it, and the model cannot have it.
    """
    setting = recipe.model.embeddings_on_host
    if setting is False or recipe.adapter.type == "none":
        return 0
    # The forward pass of another model may read the table itself.
    is_known = is_of_transformers(model)
    if setting == "auto" and (not is_known or _problem(model, _embeddings_of(model)) is not None):
        return 0
    return int(_plain_embeddings(model).weight.nbytes)


def _embeddings_of(model: nn.Module) -> Any:
    """Return the input embeddings of a model; None if it has none."""
    embeddings: Any = None
    with suppress(Exception):  # of a model that is not one of transformers, or has no embeddings
        embeddings = base_model_of(model).get_input_embeddings()
    return embeddings


def _plain_embeddings(model: nn.Module) -> Any:
    """Return the input embeddings of a model; raise `InputError` if they cannot be on the host."""
    embeddings = _embeddings_of(model)
    if (problem := _problem(model, embeddings)) is not None:
        raise InputError(f"model.embeddings_on_host: {problem}", hint=HINT)
    return embeddings


def _problem(model: nn.Module, embeddings: Any) -> str | None:
    """Return why the embeddings of a model cannot be on the host, or None."""
    if type(embeddings) is not nn.Embedding or embeddings.max_norm is not None:
        return f"the input embeddings of {type(base_model_of(model)).__name__} are no plain table of rows"
    if embeddings.weight.requires_grad:
        return "the embeddings are trained"
    if sum(weight is embeddings.weight for _, weight in model.named_parameters(remove_duplicate=False)) > 1:
        return "the head or another module uses the same table"
    return None


def remember_on_host(ids: Tensor, host: Tensor) -> None:
    """Let `HostLookup` find the token ids of a batch on the host, so that it does not wait for the device.

    Args:
        ids: Token ids on the device.
        host: The same ids on the host.
    """
    ids.on_host = host, ids._version  # type: ignore[attr-defined]


class HostLookup:
    """The forward function of embeddings whose table is on the host.

    Args:
        table: `[tokens of the vocabulary, features]` on the host.
        device: The device of the model. Some models move ids to that of the table first.
    """

    def __init__(self, table: Tensor, device: torch.device) -> None:
        self.table, self.device = table, device

    @torch.no_grad()
    def __call__(self, input: Tensor) -> Tensor:
        """Return the rows of token ids, on the device of the model.

        Args:
            input: Token ids of any shape; the name is torch's. Without a copy on the host (`remember_on_host`), or
                after they were changed in place, this waits for the device.

        Returns:
            `[*shape of the ids, features]` in the dtype of the table.
        """
        host, version = getattr(input, "on_host", (None, None))
        if host is None or input.is_inference() or input._version != version:
            host = input.cpu()
        features = self.table.shape[1]
        is_cuda = self.device.type == "cuda"
        rows = torch.empty(*input.shape, features, dtype=self.table.dtype, pin_memory=is_cuda)
        torch.index_select(self.table, 0, host.flatten(), out=rows.view(-1, features))
        return rows.to(self.device, non_blocking=True)
