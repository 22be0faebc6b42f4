"""Replace norms, gated MLPs and rotary positions of known models by Liger's Triton kernels on GPUs.

Each kernel replaces several passes over memory by one, forward and backward. Modules, their names and weights stay, and
no class of transformers is changed. Rotary positions are replaced for a whole module of transformers, on GPUs only and
until the run ends. The loss is computed by linear_cross_entropy.py, not by Liger.
"""

from __future__ import annotations

import sys
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from ftcli.models.architectures import architecture_of, model_types_with
from ftcli.models.structure import base_model_of
from ftcli.runtime.errors import InputError
from ftcli.runtime.installed import is_installed
from ftcli.runtime.patches import declare
from ftcli.runtime.process_settings import change

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe


FUNCTIONS = "liger_kernel.transformers.functional"
LIGER = declare(
    __name__,
    "liger-kernels",
    library="liger-kernel",
    versions=">=0.8.5,<0.9",
    purpose="Calls Liger's functions for norms, gated MLPs and rotary positions in transformers' modules",
    without="These parts of a model then use transformers' implementation, with more memory traffic.",
    alternative="Liger's `_apply_liger_kernel_to_instance`, which is private too and changes the loss.",
    apis=tuple(f"{FUNCTIONS}:{name}" for name in ("liger_rms_norm", "liger_swiglu", "liger_geglu", "liger_rope")),
    measurement="259.0 ms and 32.3 GiB a step, without it 324.3 ms and 40.4 GiB: 1B, 4 rows of 4,096 tokens, "
    "`bf16_pure`, layers not compiled, one H100. The difference includes that of [liger-rotary](#liger-rotary).",
)
ROTARY = declare(
    __name__,
    "liger-rotary",
    library="transformers",
    versions=">=5.17,<5.25",
    purpose="Replaces `apply_rotary_pos_emb` in the file of a model's attention until the run ends",
    without="Rotary positions then use transformers' implementation.",
    alternative="None: attention looks the function up in its own file.",
    apis=("transformers.models.llama.modeling_llama:apply_rotary_pos_emb.unsqueeze_dim",),
    measurement="259.0 ms a step, without it 278.2 ms, 32.3 GiB both times: 1B, 4 rows of 4,096 tokens, `bf16_pure`, "
    "layers not compiled, one H100.",
)
GATES = {"SiLUActivation": "liger_swiglu", "SiLU": "liger_swiglu", "GELUTanh": "liger_geglu"}


def liger_problem(recipe: Recipe, kind: str | None, *, on_gpu: bool) -> str | None:
    """Return why a model does not use Liger's kernels; None if it does.

    Args:
        recipe: The recipe.
        kind: `model_type` of the model; None for any model.
        on_gpu: Whether the run uses a GPU.
    """
    if recipe.model.use_liger_kernel is False:
        return "model.use_liger_kernel is false"
    if recipe.model.torch_compile and recipe.model.use_liger_kernel is None:
        return "torch.compile fuses the same operations"
    if not on_gpu:
        return "there is no GPU"
    if kind is not None and architecture_of(kind).liger_norm is None:
        return f"models of type {kind} were not tested with them"
    if not is_installed("liger_kernel"):
        return "the package liger-kernel is not installed"
    return LIGER.problem()


def check_liger(recipe: Recipe, kind: str | None, *, on_gpu: bool) -> None:
    """Check that a recipe with `model.use_liger_kernel: true` can use Liger's kernels on a GPU.

    On a CPU the kernels are not used, and the log contains a line about it.

    Args:
        recipe: The recipe.
        kind: `model_type` of the model; None for any model.
        on_gpu: Whether the run uses a GPU.

    Raises:
        InputError: The kernels cannot be used.
    """
    problem = liger_problem(recipe, kind, on_gpu=on_gpu)
    if recipe.model.use_liger_kernel and on_gpu and problem is not None:
        hint = f"pip install 'liger-kernel{LIGER.versions}' (ftcli's extra `kernels`), or remove the key"
        if kind is not None and architecture_of(kind).liger_norm is None:
            hint = f"remove the key; supported: {', '.join(sorted(model_types_with('liger_norm')))}"
        raise InputError(f"model.use_liger_kernel: {problem}", hint=hint)


def use_liger(model: nn.Module, recipe: Recipe, *, on_gpu: bool) -> list[str]:
    """Replace modules of a transformers model by Liger's kernels, if the recipe and the model allow it.

    Args:
        model: The model before `Accelerator.prepare`.
        recipe: The recipe.
        on_gpu: Whether the run uses a GPU.

    Returns:
        Lines for the log.

    Raises:
        InputError: The recipe sets `model.use_liger_kernel: true`, and the model cannot use them.
    """
    inner = base_model_of(model)
    kind = getattr(getattr(inner, "config", None), "model_type", "unknown")
    check_liger(recipe, kind, on_gpu=on_gpu)
    if (problem := liger_problem(recipe, kind, on_gpu=on_gpu)) is not None:
        return [f"Liger kernels: none, {problem}"] if recipe.model.use_liger_kernel else []
    counts = replace(inner, kind)
    return [f"Liger kernels: {', '.join(f'{count} {what}' for what, count in counts.items() if count)}"]


def replace(model: nn.Module, kind: str) -> dict[str, int]:
    """Replace the modules of a model for which Liger has kernels.

    Args:
        model: The model.
        kind: Its `model_type`, one with a Liger norm.

    Returns:
        Number of replaced modules of each kind.
    """
    norm = architecture_of(kind).liger_norm
    assert norm is not None, kind
    counts = {"norms": 0, "gated MLPs": 0, "rotary attentions": 0}
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = MethodType(partial(_norm, *norm), module)
            counts["norms"] += 1
        elif name.endswith("MLP") and (gate := _gate(module)) is not None:
            forward = _fused_gated if hasattr(module, "gate_up_proj") else _gated
            module.forward = MethodType(partial(forward, gate), module)
            counts["gated MLPs"] += 1
        elif (
            name.endswith("Attention") and ROTARY.is_usable() and _rotate_on_gpus(sys.modules[type(module).__module__])
        ):
            counts["rotary attentions"] += 1
    return counts


def _gate(module: nn.Module) -> str | None:
    """Return Liger's function for the activation of an MLP; None if there is none."""
    activation = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    return GATES.get(type(activation).__name__)


def _norm(casting: str, offset: float, module: Any, hidden: Tensor) -> Tensor:
    """Compute a norm of `hidden` `[..., H]` with Liger."""
    from liger_kernel.transformers.functional import liger_rms_norm

    eps = getattr(module, "variance_epsilon", None) or module.eps
    # Not in place, because the gradient that it would overwrite may also be the one of the residual stream.
    result: Tensor = liger_rms_norm(hidden, module.weight, eps, offset, casting, False)
    return result


def _gated(gate: str, module: Any, hidden: Tensor) -> Tensor:
    """Compute a gated MLP of `hidden` `[..., H]` with Liger."""
    from liger_kernel.transformers import functional

    result: Tensor = module.down_proj(getattr(functional, gate)(module.gate_proj(hidden), module.up_proj(hidden)))
    return result


def _fused_gated(gate: str, module: Any, hidden: Tensor) -> Tensor:
    """Compute a gated MLP, whose gate and up projections are one layer, of `hidden` `[..., H]` with Liger."""
    from liger_kernel.transformers import functional

    left, right = module.gate_up_proj(hidden).chunk(2, dim=-1)
    result: Tensor = module.down_proj(getattr(functional, gate)(left, right))
    return result


def _rotate_on_gpus(source: Any) -> bool:
    """Replace the rotary function of a module of transformers for tensors on GPUs. Returns whether it has one.

    Attention finds its function in the module that defines it, so the replacement is valid for the whole process.
    """
    original = getattr(source, "apply_rotary_pos_emb", None)
    if original is None or isinstance(original, _Rotary):
        return original is not None
    change(source, "apply_rotary_pos_emb", _Rotary(original))
    return True


class _Rotary:
    """Calls the function of transformers for tensors on the CPU, and that of Liger for tensors on GPUs."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if not q.is_cuda:
            rotated: tuple[Tensor, Tensor] = self.original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
            return rotated
        from liger_kernel.transformers.functional import liger_rope

        # Liger overwrites its arguments. Selective checkpointing may have kept them, and would rotate them again in the
        # backward pass.
        result: tuple[Tensor, Tensor] = liger_rope(q.clone(), k.clone(), cos, sin, None, unsqueeze_dim)
        return result
