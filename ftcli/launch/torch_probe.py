"""Import torch and the optional kernels in a child process, and try them on this machine's device: `ftcli doctor`.

The child prints one JSON object. A kernel that crashes or hangs takes nobody with it. Light: torch is imported inside
functions.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ftcli.runtime.installed import is_installed
from ftcli.runtime.machine.facts import Fact, look, ok, wrong
from ftcli.runtime.resources import PACKAGE

SECONDS = 8.0  # so that `ftcli doctor` ends within 10 s
# Kernel -> (module to import, package to install, what ftcli does without it).
KERNELS = {
    "flash-attn 4": ("flash_attn.cute", "flash-attn-4", "attention uses an older flash-attn or torch's own kernels"),
    "flash-attn 3": ("flash_attn_interface", "", ""),
    "flash-attn 2": ("flash_attn", "", ""),
    "liger-kernel": ("liger_kernel.transformers", "ftcli[kernels]", "layers use torch's own kernels"),
    "bitsandbytes": ("bitsandbytes", "ftcli[quantization]", "no 4-bit weights and no 8-bit optimizer"),
    "torchao": ("torchao", "", ""),
}


def main() -> None:
    """Print what this process finds out, as one JSON object."""
    import torch

    on_gpu = torch.cuda.is_available()
    facts: dict[str, Any] = {"device": "cuda" if on_gpu else "cpu", "kernels": {}}
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None
    facts["product"] = _problem_of(partial(_product, torch, facts["device"]))
    for name, (module, _, _) in KERNELS.items():
        if is_installed(module.partition(".")[0]):
            facts["kernels"][name] = _problem_of(partial(_try, torch, name, module, on_gpu))
    print(json.dumps(facts))


def _problem_of(action: Callable[[], object]) -> str:
    """Return why an action failed, in one line; empty if it succeeded."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return ""


def _product(torch: Any, device: str) -> None:
    """Multiply two matrices on the device and check one value."""
    value = torch.ones(64, 64, device=device, dtype=torch.bfloat16) @ torch.ones(64, 64, device=device).bfloat16()
    if value[0, 0].item() != 64:
        raise RuntimeError(f"a product of ones gave {value[0, 0].item()} instead of 64")


def _try(torch: Any, name: str, module: str, on_gpu: bool) -> None:
    """Import a kernel, and call it if there is a GPU."""
    imported = importlib.import_module(module)
    if not on_gpu:
        return
    if name.startswith("flash-attn"):
        q = torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16)
        imported.flash_attn_func(q, q, q, causal=True)
    elif name == "liger-kernel":
        imported.LigerRMSNorm(64).to("cuda")(torch.randn(4, 64, device="cuda"))
    elif name == "bitsandbytes":
        imported.functional.quantize_4bit(torch.randn(64, 64, device="cuda"))
    torch.cuda.synchronize()


def start_probe() -> subprocess.Popen[str]:
    """Start the child process."""
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(PACKAGE.parent)])
    return subprocess.Popen(
        [sys.executable, "-m", "ftcli.launch.torch_probe"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )


def probe_facts(child: subprocess.Popen[str], started: float, gpus: int, seconds: float = SECONDS) -> list[Fact]:
    """Wait for the child process and return the facts of torch, its device and the kernels.

    Args:
        child: The child process.
        started: When it was started, on the monotonic clock.
        gpus: Number of GPUs that training should see.
        seconds: How long it may take; then it is killed.
    """
    try:
        out, err = child.communicate(timeout=max(0.1, started + seconds - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        remedy = "is the machine busy, or Python on a slow network file system? Each rank of a run waits as long"
        return [look("torch on its device", f"not checked: importing torch took more than {seconds:.0f} s", remedy)]
    if child.returncode:
        last = (err.strip().splitlines() or ["no output"])[-1]
        return [wrong("torch on its device", f"torch cannot be imported: {last}", "install torch again")]
    found = json.loads(out.strip().splitlines()[-1])
    facts = [_device_fact(found, gpus)]
    if found["nccl"]:
        facts.append(ok("NCCL", f"{found['nccl']} of torch"))
    return facts + kernel_facts(found["kernels"], found["device"] == "cuda")


def _device_fact(found: dict[str, Any], gpus: int) -> Fact:
    """Return the fact about the device that torch uses."""
    topic = "torch on its device"
    if found["product"]:
        return wrong(topic, f"a matrix product on {found['device']} fails: {found['product']}", "install torch again")
    if gpus and found["device"] == "cpu":
        remedy = "install the build of torch that fits the driver, and check CUDA_VISIBLE_DEVICES"
        return wrong(topic, f"torch sees none of {gpus} GPUs", remedy)
    return ok(topic, f"matrix products work on {found['device']}")


def kernel_facts(problems: dict[str, str], on_gpu: bool) -> list[Fact]:
    """Return the facts of the attention and fused kernels.

    Args:
        problems: Installed kernel -> why it cannot be used; empty if it can.
        on_gpu: Whether torch sees a GPU.
    """
    facts = []
    for name, problem in problems.items():
        if problem:
            facts.append(look(name, f"installed, but cannot be used: {problem}", "install a version that fits torch"))
        else:
            facts.append(ok(name, "usable on this GPU" if on_gpu else "importable"))
    missing = {name: rest for name, (_, *rest) in KERNELS.items() if name not in problems and rest[0]}
    if missing and not on_gpu:
        facts.append(ok("kernels for GPUs", f"not installed, and not used on a CPU: {', '.join(missing)}"))
    elif missing:
        facts += [
            look(name, f"not installed: {without}", f"pip install '{package}'")
            for name, (package, without) in missing.items()
        ]
    return facts


if __name__ == "__main__":
    main()
