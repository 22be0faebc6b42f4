"""Decide whether a run replays the passes of its model as CUDA graphs. captured_pass.py captures and replays them.

A small model launches about a thousand kernels in a pass, and the host often needs longer to launch them than the
device to compute. Beside busy loader processes it needs longer still, and the device waits. A CUDA graph launches all
of them at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftcli.config.graph_exclusions import expects_graphs, graph_exclusion
from ftcli.models.hub import attention_of
from ftcli.models.kernels.capture_setting import HINT
from ftcli.models.kernels.captured_pass import CapturedPass
from ftcli.models.positions import needs_left_padding
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from ftcli.config.recipe import Recipe


def use_cuda_graphs(
    model: nn.Module, recipe: Recipe, device: str, *, recomputed: str, is_whole: bool, first: int = 1
) -> list[str]:
    """Replay training passes of a model as CUDA graphs, if the recipe sets `model.cuda_graphs` or leaves it open.

    A recipe that leaves it open gets graphs where they are known to work and memory allows them.

    Args:
        model: The model, not yet prepared.
        recipe: The recipe with `model.torch_compile` decided.
        device: Type of the device, such as "cuda".
        recomputed: What the backward pass computes again: none, selective, full or tiled.
        is_whole: Whether the backend keeps whole weights at the same place on every device.
        first: Forward passes of the first step, in which nothing is captured.

    Returns:
        One line for the log, or none without graphs.

    Raises:
        InputError: The recipe sets `model.cuda_graphs`, and this run cannot have graphs.
    """
    requested = recipe.model.cuda_graphs
    if requested is False:
        return []
    excluded = graph_exclusion(recipe)
    problem = f"it cannot be combined with {excluded}" if excluded else None
    problem = problem or _problem_of_run(device, recomputed, is_whole=is_whole) or _problem_of_model(model)
    if problem is not None and requested:
        raise InputError(f"model.cuda_graphs: {problem}", hint=HINT)
    if problem is not None or not expects_graphs(recipe, getattr(model.config, "model_type", None)):
        return []
    longest = recipe.data.max_length if getattr(model, "main_input_name", None) == "input_ids" else None
    model.forward = CapturedPass(model, is_optional=not requested, first=first, longest=longest)
    return ["CUDA graphs: forward and backward passes, one graph of each for a shape of micro-batches"]


def _problem_of_run(device: str, recomputed: str, *, is_whole: bool) -> str | None:
    """Return why a run cannot replay passes, or None. The recipe itself has been checked (config/recipe.py)."""
    if device != "cuda":
        return "it needs an NVIDIA GPU"
    if not is_whole:
        return "this profile shards weights, which then have no fixed place"
    if recomputed != "none":
        return "this run recomputes activations to save memory"
    return None


def _problem_of_model(model: nn.Module) -> str | None:
    """Return why the passes of a model cannot be replayed, or None.

    What the host decides for each batch, such as whether a mask is needed, would be decided once for all. For texts
    with bidirectional attention padding_masks.py decides it.
    """
    kind, modules = getattr(model, "main_input_name", None), list(model.modules())
    is_causal = any(getattr(module, "is_causal", False) for module in modules)
    is_encoder = kind == "input_ids" and type(model).__name__.endswith("ForSequenceClassification") and not is_causal
    if kind != "pixel_values" and not is_encoder:
        return "it is for models that classify images, or texts with attention in both directions"
    if (attention := attention_of(model)) not in (None, "sdpa", "eager"):
        return f"attention {attention} reads the mask on the host"
    if getattr(model.config, "output_hidden_states", False) or getattr(model.config, "output_attentions", False):
        return "the model's configuration asks for more outputs than logits"
    if getattr(model.config, "layerdrop", 0) or getattr(model.config, "encoder_layerdrop", 0):
        return "the model leaves out layers that the host draws for each pass (layerdrop)"
    if needs_left_padding(model.config):
        return "the model's classifier reads the last position, where a replayed pass may have padding"
    if any("BatchNorm" in type(module).__name__ and module.momentum is None for module in modules):
        return "a batch norm without momentum reads its number of steps from the device"
    return None
