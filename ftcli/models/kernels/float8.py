"""Linear layers with 8-bit float matrix products (torchao), for precision fp8.

Before each product of a layer, forward and backward, both bfloat16 factors are scaled and rounded to float8 (e4m3;
gradients e5m2). Each tensor has one scale, from its largest element. All other computation is that of bf16. Weights may
therefore be sent in bfloat16, and the curve does not depend on the profile. These stay in bfloat16: the head, layers
whose sizes the hardware does not support, and evaluation. On CPU (`--cpu`) the same values are rounded and then
multiplied in bfloat16.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

from ftcli.runtime.errors import InputError, Problem
from ftcli.runtime.installed import is_installed
from ftcli.runtime.patches import declare

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe


MIN_CAPABILITY = (8, 9)  # compute capability of Ada, the first GPUs that multiply 8-bit floats
SIZE_MULTIPLE = 16  # both sizes of a weight must be multiples of this number

FLOAT8 = "torchao.float8.float8_linear"
PRODUCTS = declare(
    __name__,
    "float8-products",
    library="torchao",
    versions=">=0.18,<0.19",
    purpose="Replaces the forward of torchao's Float8Linear, so that the weight is bfloat16 before it is scaled",
    without="precision fp8 is refused.",
    alternative="The forward of `convert_to_float8_training`, whose result depends on the profile.",
    apis=(
        f"{FLOAT8}:matmul_with_hp_or_float8_args.apply",
        f"{FLOAT8}:Float8Linear.linear_mm_config",
        f"{FLOAT8}:Float8Linear.config",
    ),
    required=True,
    measurement="It costs 3 % of the speed and 0.9 GiB for 1B on one H200 "
    "([performance](../explanation/performance.md#fp8)).",
)


def check_float8(recipe: Recipe, *, cpu: bool) -> list[Problem]:
    """Return why this machine cannot train a recipe with precision fp8, as far as is known without torch.

    Args:
        recipe: The recipe.
        cpu: Whether the run uses CPU processes.
    """
    from ftcli.runtime.devices import count_gpus

    if recipe.precision != "fp8":
        return []
    problems = []
    if not is_installed("torchao"):
        hint = "pip install torchao, or set precision to bf16"
        problems.append(Problem("precision fp8 needs torchao, which is not installed", hint=hint))
    if not cpu and not count_gpus():
        hint = "set precision to bf16; to simulate fp8 on this machine: --cpu"
        problems.append(Problem("precision fp8 needs a GPU that multiplies 8-bit floats", hint=hint))
    if recipe.adapter.type != "none":
        hint = "set precision to bf16, or train the whole model"
        problems.append(Problem("precision fp8 is not faster with an adapter: its matrices are too small", hint=hint))
    return problems


def check_float8_device(recipe: Recipe, device: torch.device) -> None:
    """Check before the model loads that a GPU multiplies 8-bit floats.

    Args:
        recipe: The recipe of the run.
        device: The device of this process.

    Raises:
        InputError: The recipe's precision is fp8 and the GPU does not support it.
    """
    import torch

    if recipe.precision != "fp8" or device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise InputError(f"precision fp8: {name} cannot multiply 8-bit floats", hint="set precision to bf16")


def multiply_in_float8(model: nn.Module, recipe: Recipe, device_type: str) -> list[str]:
    """Convert the linear layers of a model to 8-bit float products. Names and values of weights do not change.

    Args:
        model: The model, not prepared.
        recipe: The recipe of the run; with another precision than fp8 nothing is done.
        device_type: Such as cuda.

    Returns:
        Lines for the log.

    Raises:
        InputError: No layer has supported sizes.
    """
    import torch

    if recipe.precision != "fp8":
        return []
    PRODUCTS.require()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    embeddings = getattr(model, "get_output_embeddings", lambda: None)
    head = embeddings()

    def fits(module: nn.Module, name: str) -> bool:
        if type(module) is not torch.nn.Linear or module is head:
            return False
        return module.in_features % SIZE_MULTIPLE == 0 and module.out_features % SIZE_MULTIPLE == 0

    # The number of rows is a size of the product for the weight's gradient. It is padded to the multiple.
    config = Float8LinearConfig(pad_inner_dim=True, emulate=device_type != "cuda")
    convert_to_float8_training(model, config=config, module_filter_fn=fits)
    linear: list[Any] = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    converted = [module for module in linear if type(module).__name__ == "Float8Linear"]
    if not converted:
        problem = f"precision fp8: no layer of {type(model).__name__} has sizes that are multiples of {SIZE_MULTIPLE}"
        raise InputError(problem, hint="set precision to bf16")
    for module in converted:
        module.train(model.training)  # torchao creates new modules
        module.forward = MethodType(_forward, module)
    line = f"fp8: {len(converted)} of {len(linear)} linear layers, one scale per tensor"
    if device_type != "cuda":
        return [f"{line}; simulated: rounded as on a GPU and multiplied in bfloat16"]
    warning = "" if recipe.model.torch_compile else "; without model.torch_compile fp8 is slower than bf16"
    return [line + warning]


def _forward(module: Any, inputs: Tensor) -> Tensor:
    """Compute Float8Linear's forward with weight and bias cast to bfloat16 first, so that profiles do not differ."""
    import torch
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    from ftcli.models.kernels.weight_rounding import round_to_bfloat16

    if not module.training:
        return torch.nn.functional.linear(inputs, module.weight, module.bias)
    half, weight = inputs.to(torch.bfloat16), round_to_bfloat16(module.weight)
    result: Tensor = matmul_with_hp_or_float8_args.apply(half, weight.t(), module.linear_mm_config, module.config)
    return result if module.bias is None else result + round_to_bfloat16(module.bias)
