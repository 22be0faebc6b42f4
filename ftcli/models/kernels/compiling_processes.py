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
    unmeasured="The earlier start of these processes was measured only "
    "[together with other changes](../explanation/performance.md#two-h100s).",
)


def start_compiling_processes() -> None:
    """Start the processes that compile Triton kernels, if Triton is installed.

    torch.compile starts them at its first graph. They take seconds to import torch, and until then kernels are compiled
    one after the other in this process. Here they start while the weights are still copied to the device.
    """
    if COMPILING_PROCESSES.is_usable():
        from torch._inductor import async_compile

        async_compile.maybe_warm_pool()
