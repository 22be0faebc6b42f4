"""Build tiny real models and tokenizers, and run functions on several processes, for tests of tasks.

Nothing is downloaded and nothing is mocked. `check_task` applies ftcli's contract tests to a user's own task.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from ftcli.runtime.fork_server import fork_context
from ftcli.runtime.patches import declare
from ftcli.runtime.threads import passive_waiting
from ftcli.task_contract import CHECKS as CHECKS
from ftcli.task_contract import TaskCase as TaskCase
from ftcli.task_contract import check_task as check_task
from ftcli.tiny_models import CHAT_TEMPLATE as CHAT_TEMPLATE
from ftcli.tiny_models import NO_WEIGHTS as NO_WEIGHTS
from ftcli.tiny_models import save_hollow as save_hollow
from ftcli.tiny_models import save_tiny_causal as save_tiny_causal
from ftcli.tiny_models import save_tiny_encoder as save_tiny_encoder
from ftcli.tiny_models import save_tiny_mobilenet as save_tiny_mobilenet
from ftcli.tiny_models import save_tiny_resnet as save_tiny_resnet
from ftcli.tiny_models import save_tiny_vision_language as save_tiny_vision_language
from ftcli.tiny_models import save_tiny_vit as save_tiny_vit
from ftcli.tiny_models import tiny_tokenizer as tiny_tokenizer

LAUNCHER = declare(
    __name__,
    "launcher-environment",
    library="accelerate",
    versions=">=1.15,<1.16",
    purpose="Returns the variables that Accelerate's launcher exports for a profile, without starting it",
    without="Tests cannot run functions under a profile.",
    alternative="None: the launcher merges a profile with its arguments in this private function.",
    apis=(
        "accelerate.commands.launch:_validate_launch_command",
        "accelerate.utils.launch:prepare_deepspeed_cmd_env",
        "accelerate.utils.launch:prepare_multi_gpu_env",
    ),
    required=True,
)
# Slow imports of every rank. A server process imports them once, and ranks fork from it.
PRELOADED = [
    "deepspeed",
    "peft",
    "datasets",
    "ftcli.launch.worker",
    "ftcli.loop",
    "ftcli.checkpoint.final",
    "ftcli.launch.launcher",
]
PRELOADED += ["torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "accelerate.utils"]
PRELOADED += ["deepspeed.runtime.zero.muon.muon_optimizer"]  # imports torch's compiler
# Imports of the server process for ranks on GPUs. CUDA does not work in a process that is forked after CUDA was
# initialised, so the list has only modules that do not initialise it. Each rank imports the others itself:
# transformers' models (through torchao), peft (through bitsandbytes), deepspeed and liger_kernel.
BEFORE_CUDA = [
    "datasets",
    "ftcli.launch.worker",
    "ftcli.loop",
    "ftcli.checkpoint.final",
    "ftcli.launch.launcher",
    "accelerate.utils",
]
BEFORE_CUDA += ["torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint.state_dict"]
BEFORE_CUDA += ["transformers.masking_utils", "transformers.cache_utils", "sklearn.metrics"]
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables for the duration of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def profile_environment(profile: str, processes: int = 2) -> dict[str, str]:
    """Return the environment variables that Accelerate's launcher sets for a profile.

    Args:
        profile: Name or path of the profile.
        processes: Number of processes.
    """
    LAUNCHER.require()
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    from ftcli.config.profile import load_profile

    loaded = load_profile(profile)
    line = ["--config_file", str(loaded.path), "--num_processes", str(processes), "--main_process_port", "0", "x.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(line))
    if loaded.distributed_type == "NO":
        return {}
    if loaded.distributed_type == "DEEPSPEED":
        arguments.deepspeed_fields_from_accelerate_config = ",".join(loaded.values["deepspeed_config"])
        _, exported = prepare_deepspeed_cmd_env(arguments)
    else:
        exported = prepare_multi_gpu_env(arguments)
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    return {name: value for name, value in exported.items() if name.startswith(prefixes)}


def run_on_cpu(function: Callable[..., Any], *args: Any, processes: int = 2, profile: str = "ddp") -> list[Any]:
    """Run a function on several CPU processes, with all GPUs hidden.

    Ranks fork from one process that has imported all libraries. The first call takes the time of these imports. Later
    calls start within a second.

    Args:
        function: A function at the top level of a module.
        args: Its arguments.
        processes: Number of ranks.
        profile: Name or path of the profile; "single" for no distribution.

    Returns:
        The results of all ranks, in order of rank.

    Raises:
        RuntimeError: A rank raised an exception. The message has its traceback.

    Example:
        >>> run_on_cpu(train_and_return_loss, "recipe.yaml", processes=2, profile="fsdp")
    """
    with environment(**ON_CPU, **passive_waiting(cpu=True)):
        return _run(fork_context(PRELOADED), function, args, processes, profile)


@cache
def forks_may_start(start: Callable[[], None]) -> bool:
    """Return whether a process that forks from the server of `BEFORE_CUDA` can run `start`. One process tries it.

    If it raises, dies or hangs, one line is printed to stderr.
    """
    context = fork_context(BEFORE_CUDA)
    answers = context.SimpleQueue()
    child = context.Process(target=_try_to, args=(start, answers), daemon=True)
    child.start()
    child.join(timeout=120)
    problem = "it hangs" if child.is_alive() else "it died" if answers.empty() else answers.get()
    child.kill()
    child.join()
    if problem:
        print(
            f"ranks do not fork, and each imports all libraries: a forked process could not start: {problem}",
            file=sys.stderr,
        )
    return not problem


def _try_to(start: Callable[[], None], answers: Any) -> None:
    """Call `start` and put its error message into a queue; an empty one if there is no error."""
    try:
        start()
    except Exception as error:
        answers.put(f"{type(error).__name__}: {error}")
        return
    answers.put("")


def _start_cuda() -> None:
    import torch

    torch.cuda.init()


def meeting_point(processes: int) -> tuple[Any, dict[str, str]]:
    """Return a store that this process serves, and the environment for `processes` ranks of one host to use it.

    A free port that rank 0 opens seconds later may be in use by then. The port of this store is already open, and ranks
    connect to it as to the store of torchrun's agent. The caller must keep the store while ranks connect.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def run_on_processes(function: Callable[..., Any], *args: Any, processes: int = 2, profile: str = "ddp") -> list[Any]:
    """Run a function on several ranks under a profile's environment, on GPUs if there are any.

    The function may prepare several runs one after another. Ranks fork from one process that has imported the libraries
    that do not initialise CUDA. If forked processes cannot use CUDA, each rank is a new process. Arguments, results and
    errors are those of `run_on_cpu`.
    """
    with environment(OMP_NUM_THREADS="1"):
        context = fork_context(BEFORE_CUDA) if forks_may_start(_start_cuda) else multiprocessing.get_context("spawn")
        return _run(context, function, args, processes, profile)


def _run(context: Any, function: Callable[..., Any], args: tuple[Any, ...], processes: int, profile: str) -> list[Any]:
    store, shared = meeting_point(processes)  # the store lives as long as this name
    shared = {} if profile == "single" else shared | profile_environment(profile, processes)
    shared = dict(os.environ) | {"OMP_NUM_THREADS": "1"} | shared
    results: Any = context.Queue()
    children = [  # not daemons, because those may not start loader processes
        context.Process(target=_on_rank, args=(rank, shared, function, args, results)) for rank in range(processes)
    ]
    values: dict[int, Any] = {}
    try:
        for child in children:
            child.start()
        for _ in children:
            rank, value, error = results.get(timeout=600)
            if error is not None:
                raise RuntimeError(f"rank {rank} failed:\n{error}")
            values[rank] = value
        for child in children:
            child.join(timeout=60)
    finally:
        for child in children:
            child.kill()
    return [values[rank] for rank in range(processes)]


def _on_rank(rank: int, shared: dict[str, str], function: Callable[..., Any], args: Any, results: Any) -> None:
    os.environ.clear()  # a forked process has the environment of an earlier call
    os.environ.update(shared)
    if "WORLD_SIZE" in shared:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    multiprocessing.set_start_method(None, force=True)  # of processes that a rank starts
    import torch

    torch.set_num_threads(1)
    try:
        results.put((rank, function(*args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
