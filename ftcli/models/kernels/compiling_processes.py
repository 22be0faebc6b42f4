"""Start the processes of torch.compile early, so that they are ready when the first graph is compiled."""

from __future__ import annotations


def start_compiling_processes() -> None:
    """Start the processes that compile Triton kernels, if Triton is installed.

    torch.compile starts them at its first graph. They take seconds to import torch, and until then kernels are compiled
    one after the other in this process. Here they start while the weights are still copied to the device.
    """
    from torch._inductor import async_compile

    if hasattr(async_compile, "maybe_warm_pool"):
        async_compile.maybe_warm_pool()
