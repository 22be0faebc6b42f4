"""Start the processes of torch.compile early, so that they are ready when the first graph is compiled."""

from __future__ import annotations

from ftcli.runtime.patches import declare

COMPILING_PROCESSES = declare(
    __name__,
    "compiling-processes",
    library="torch",
    versions=">=2.11,<2.14",
    purpose="Starts the processes that compile Triton kernels before the weights are copied to the device",
    without="They start with the first graph, and until they are ready kernels are compiled one after the other.",
    alternative="None: torch.compile starts them itself, when it compiles its first graph.",
    apis=("torch._inductor.async_compile:maybe_warm_pool",),
    measurement="The first step of 8B LoRA comes after 22.2, 22.8 and 28.9 s with an empty cache, without it after "
    "21.0 and 25.4 s: one H200, five starts in turns. The difference is smaller than that between two starts.",
)


def start_compiling_processes() -> None:
    """Start the processes that compile Triton kernels, if Triton is installed.

    torch.compile starts them at its first graph. They take seconds to import torch, and until then kernels are compiled
    one after the other in this process. Here they start while the weights are still copied to the device.
    """
    if COMPILING_PROCESSES.is_usable():
        from torch._inductor import async_compile

        async_compile.maybe_warm_pool()
