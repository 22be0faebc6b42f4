"""Check that `accelerate launch` without ftcli started as many processes as requested. Light: never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ftcli.runtime.errors import InputError
from ftcli.runtime.whole_numbers import whole_number

# What torchrun and MPI set for each process; `accelerate launch` sets none of them for a single process.
RANK_VARIABLES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
NUMBER_OPTIONS = ("--num_processes", "--num-processes")


def check_processes(environ: Mapping[str, str]) -> None:
    """Raise when several processes were requested from `accelerate launch` and it started only this one.

    With --cpu, or with a configuration that is not distributed, Accelerate starts one process for any requested number
    and reports nothing.

    Args:
        environ: The environment of this process, which `accelerate launch` has started.

    Raises:
        InputError: More than one process was requested.
    """
    if "FTCLI_LAUNCHED" in environ or any(name in environ for name in RANK_VARIABLES):
        return
    number = _requested_processes(environ)
    if number:
        raise InputError(
            f"accelerate launch has started one process instead of {number}",
            hint="with --cpu it starts one process only: remove --cpu and give --config_file with a distributed "
            "profile, such as accelerate_configs/ddp.yaml; or use: "
            "ftcli train RECIPE --profile ddp --cpu --num-processes N",
        )


def _requested_processes(environ: Mapping[str, str]) -> str:
    """Return the number of processes on the parent's command line, or "several"; empty for one or unknown."""
    import psutil

    with suppress(psutil.Error):
        launcher = psutil.Process().parent()
        if launcher is None:
            return ""
        words = [part for word in launcher.cmdline() for part in word.split("=", 1)]
        for option, value in zip(words, words[1:], strict=False):
            if option in NUMBER_OPTIONS:
                return value if (whole_number(value) or 0) > 1 else ""
        # Accelerate sets this variable if its configuration file requests more than one process.
        if "MASTER_ADDR" in environ and "MASTER_ADDR" not in launcher.environ():
            return "several"
    return ""
