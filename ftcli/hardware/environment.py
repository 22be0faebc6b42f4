"""The devices that this process sees, and the warnings of other libraries."""

from __future__ import annotations

import logging
import os
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def has_accelerator() -> bool:
    """Return whether this machine has a device besides the CPU that PyTorch can use."""
    import torch

    return torch.accelerator.is_available()


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed PyTorch's generators of the host and of a device of this process.

    `torch.manual_seed` would seed all kinds of devices. For devices that are not initialised it stores the call with
    its stack, which is slow and grows with every step.
    """
    import torch

    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


def use_cpu_in_deepspeed() -> None:
    """Set DeepSpeed's accelerator to the CPU. Without this, importing DeepSpeed prints a warning on standard output."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def quiet_libraries() -> None:
    """Hide warnings and progress bars of transformers, datasets and other libraries.

    FutureWarnings of these libraries address their developers, not users of ftcli.
    """
    import datasets
    import transformers

    from ftcli.hardware.import_structure import import_models

    import_models()
    if not has_accelerator():
        use_cpu_in_deepspeed()
    for module in ("torch.distributed", "transformers", "accelerate", "deepspeed", "peft"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module.replace(".", r"\."))
    # DistributedDataParallel copies such gradients: those of 1 x 1 convolutions in channels-last format.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    transformers.logging.set_verbosity_error()
    datasets.logging.set_verbosity(logging.CRITICAL)  # ftcli reports unreadable rows itself, once
    # Their progress bars would overwrite the progress line of the run on the same terminal.
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
