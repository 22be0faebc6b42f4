"""Sharded optimizer state, gradients and weights: DeepSpeed's ZeRO, which steps and clips inside backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from . import loading

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ..planning import Plan
    from ..recipe import Recipe


def options() -> dict[str, Any]:
    """Return what the Accelerator is made with: nothing more than the launcher's environment says."""
    return {}


def configure(accelerator: Accelerator, recipe: Recipe, plan: Plan) -> None:
    """Write the recipe's and the plan's numbers into DeepSpeed's configuration, where Accelerate's would win."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = plan.micro_size
    config["gradient_accumulation_steps"] = plan.accumulation
    config["train_batch_size"] = plan.global_size
    config["gradient_clipping"] = recipe.optimizer.max_grad_norm or 0.0  # 0: DeepSpeed does not clip
    if recipe.precision == "bf16_pure":  # never under bf16: it would make the float32 weights out of rounded ones
        config["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    # An optimizer on the host stays ours: Accelerate would swap in DeepSpeed's, compiled at run time.
    config.setdefault("zero_force_ds_cpu_optimizer", False)


def fit(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return the model as it is; DeepSpeed's engine moves it."""
    return model


def reads_once() -> bool:
    """Say whether the profile asks that one rank reads the weights for all: under ZeRO-3 only."""
    from accelerate.state import AcceleratorState

    return bool(AcceleratorState().deepspeed_plugin.zero3_init_flag)


@contextmanager
def handing_out(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Give every rank its pieces of the reader's weights before the block, one whole parameter at a time."""
    from deepspeed.runtime.zero import Init

    memory = loading.HostMemory()

    class OneAtATime(torch.nn.Module):
        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            """Yield parameters that DeepSpeed broadcasts and cuts before it asks for the next."""
            for parameter in model.parameters():
                if parameter.is_meta:
                    loading.replace(parameter, torch.empty_like(parameter, device=accelerator.device))
                value = parameter.detach()
                yield parameter
                memory.release(value)
                del value

    Init(module=OneAtATime(), config_dict_or_path=accelerator.state.deepspeed_plugin.dschf.config)
    loading.share_buffers(model, accelerator.device)
    yield


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DeepSpeed's engine."""
    inner: Any = model.module
    return inner


def backward(accelerator: Accelerator, loss: Tensor, factor: float) -> None:
    """Add the gradients of `loss`, which DeepSpeed multiplies by `factor` and divides by it before it clips."""
    if factor != 1.0:
        accelerator.deepspeed_engine_wrapped.engine.optimizer.override_loss_scale(factor)
    accelerator.backward(loss)


def clip(accelerator: Accelerator, model: nn.Module, max_norm: float | None, factor: float) -> Tensor:
    """Return the global norm before clipping; DeepSpeed unscaled, clipped as `configure` said, and stepped.

    A norm that is not finite is infinity here, and DeepSpeed did not step.
    """
    norm: Any = model.get_global_grad_norm()  # type: ignore[operator]
    return torch.as_tensor(norm, dtype=torch.float32)


def full_parameter(parameter: nn.Parameter) -> Tensor:
    """Return the whole parameter, gathered over the ranks when ZeRO-3 has it in pieces."""
    from deepspeed.runtime.zero import GatheredParameters

    if not hasattr(parameter, "ds_id"):
        return parameter.data
    with GatheredParameters([parameter]):
        return parameter.data.clone()


def settle(model: nn.Module) -> None:
    """Nothing to do before parameters are read."""


@contextmanager
def loaded_whole() -> Iterator[None]:
    """Hide ZeRO-3 from transformers: it holds pieces beside the whole and cannot drop a head of another size."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(AcceleratorState().deepspeed_plugin.dschf)
