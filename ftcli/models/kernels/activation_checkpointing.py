"""Recompute activations in the backward pass (gradient checkpointing).

Results do not change, because recomputation uses the random numbers of the forward pass. The recipe or the estimate of
memory_saving.py selects the mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ftcli.models.kernels.unread_outputs import checkpoint_contexts
from ftcli.runtime.errors import InputError
from ftcli.runtime.patches import declare

if TYPE_CHECKING:
    from torch import nn


# `selective` stores the results of matrix products and of attention. Other operations of a layer are cheap.
MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm"}
# A product over so few features, with many times as many results, is computed as fast as its result is read. Such is
# the second product of a LoRA layer, whose result is as large as that of the layer itself.
FEW_FEATURES, TIMES = 128, 4
ATTENTION_KERNELS = ("attention", "attn", "flash")  # parts of kernel names in torch and flash-attn
SCHEMAS = declare(
    __name__,
    "attention-schemas",
    library="torch",
    versions=">=2.11,<2.14",
    purpose="Reads the names of an attention operation's arguments, to find whether it draws dropout",
    without="Selective checkpoints then compute attention again instead of keeping its result.",
    alternative="None: operations have no public schema.",
    apis=("torch._ops:OpOverload._schema",),
    newer_apis=("torch:_scaled_mm", "torch:_grouped_mm"),
    measurement="269.1 ms and 27.3 GiB a step, without it 277.8 ms and 26.3 GiB: 1B, 4 rows of 4,096 tokens, "
    "`bf16_pure`, selective recomputation, one H100.",
)


def can_recompute(model: nn.Module) -> bool:
    """Return whether the layers of a model support recomputation from their inputs."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def enable_recomputation(model: nn.Module, mode: str) -> None:
    """Enable gradient checkpointing in every layer of a transformers model.

    Args:
        model: The model, not prepared.
        mode: none stores all activations; selective stores matrix products and attention; full and tiled store
            the inputs of layers only.

    Raises:
        InputError: The model does not support it.
    """
    if mode == "none":
        return
    if not can_recompute(model):
        problem = f"model.gradient_checkpointing: {type(model).__name__} does not support it"
        raise InputError(problem, hint="set it to none")
    # The reentrant variant loses gradients if a layer's input is frozen or passed by keyword.
    options: dict[str, Any] = {"use_reentrant": False, "context_fn": checkpoint_contexts}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, recompute_policy)
    module: Any = model  # transformers 5.23 renames the method and still has the old name
    (getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable)(options)


def recompute_policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether the result of an operation is stored; a policy for `create_selective_checkpoint_contexts`.

    Attention with dropout is recomputed. If it were skipped, it would not advance the random generator, and all later
    dropout masks would differ from those of the forward pass.
    """
    name = operation.name().rpartition("::")[2].partition(".")[0]
    is_stored = name in MATRIX_PRODUCTS and not _expands_few_features(args)
    if not is_stored and any(word in name for word in ATTENTION_KERNELS) and SCHEMAS.is_usable():
        schema = getattr(operation, "_schema", None)
        names = [] if schema is None else [argument.name for argument in schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        is_stored = not any(value for key, value in arguments.items() if "dropout" in key)
    return CheckpointPolicy.MUST_SAVE if is_stored else CheckpointPolicy.PREFER_RECOMPUTE


def _expands_few_features(factors: Sequence[Any]) -> bool:
    """Return whether the last factor of a product has few rows and many columns: it makes many features of few."""
    shape: Any = getattr(factors[-1], "shape", ()) if factors else ()
    return len(shape) == 2 and shape[0] <= FEW_FEATURES and shape[1] > TIMES * shape[0]
