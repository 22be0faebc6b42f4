"""Which recipes and models can have CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftcli.config.task_registry import is_custom_task, task_class

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


# Model types whose replayed passes have been compared with others on a GPU (tests/gpu/test_cuda_graphs_on_gpus.py).
COMPARED = frozenset(
    (
        *("albert", "bert", "camembert", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta"),
        *("beit", "convnext", "convnextv2", "deit", "dinov2", "mobilenet_v2", "regnet", "resnet", "swin", "vit"),
    )
)


def expects_graphs(recipe: Recipe, model_type: str | None) -> bool:
    """Return whether a run with whole weights on NVIDIA GPUs has CUDA graphs if it recomputes nothing.

    Args:
        recipe: The recipe.
        model_type: `model_type` of the model; None if it is not known.
    """
    requested = recipe.model.cuda_graphs
    if requested is False or graph_exclusion(recipe) is not None:
        return False
    task = task_class(recipe.task)
    has_fixed_forward = getattr(task, "has_fixed_forward", False)
    # A task of the user may do more with a forward pass than a graph allows, such as use its hooks, also if it inherits
    # from a shipped task.
    if is_custom_task(recipe.task) and "has_fixed_forward" not in getattr(task, "__dict__", {}):
        has_fixed_forward = False
    return bool(requested) or (has_fixed_forward and model_type in COMPARED)


def graph_exclusion(recipe: Recipe) -> str | None:
    """Return the first setting of a recipe that excludes `model.cuda_graphs`, as "key: value", or None."""
    model, shipped = recipe.model, None if is_custom_task(recipe.task) else task_class(recipe.task)
    excluded = {
        f"task: {recipe.task}": shipped is not None and not getattr(shipped, "has_fixed_forward", False),
        "precision: fp8": recipe.precision == "fp8",
        f"adapter.type: {recipe.adapter.type}": recipe.adapter.type != "none",
        "model.torch_compile: true": bool(model.torch_compile),
        "model.activation_offloading: true": model.activation_offloading is True,
        f"model.gradient_checkpointing: {model.gradient_checkpointing}": model.gradient_checkpointing
        not in ("auto", "none"),
        "model.batch_norm: sync": model.batch_norm == "sync",
    }
    return next((setting for setting, is_set in excluded.items() if is_set), None)
