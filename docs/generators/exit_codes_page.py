"""Generate reference/exit-codes.md from the constants in ftcli's errors module."""

from __future__ import annotations

from markup import header, table

from ftcli.runtime import errors
from ftcli.runtime.errors import EXIT_DONE, EXIT_FAILED, EXIT_INPUT, EXIT_RESUME, EXIT_SIGNAL

MEANINGS = {
    "EXIT_DONE": (f"{EXIT_DONE}", "The command succeeded.", "Nothing."),
    "EXIT_FAILED": (
        f"{EXIT_FAILED}",
        "The command failed: an unexpected exception, a full disk, a loss that is not finite, or a rank that died. "
        "`ftcli parity` also ends with this code if a curve leaves the tolerance, and `ftcli export` if the exported "
        "weights differ from the trained ones. `ftcli trace` ends with the code of the ranks that it started.",
        "Read the last lines of the log. A run with checkpoints resumes with `--resume auto`.",
    ),
    "EXIT_INPUT": (
        f"{EXIT_INPUT}",
        "The input is invalid: recipe, profile, data, command line, or not enough device memory. `ftcli doctor` also "
        "ends with this code if a fact of a machine is wrong, and `ftcli check --data` and `ftcli preview` if the "
        "prepared rows have an error; both print the rows or their statistics, too.",
        "Correct the input. Every message names the file and line or the key, and what to do.",
    ),
    "EXIT_RESUME": (
        f"{EXIT_RESUME}",
        "The run was stopped by a signal, by the file `stop` in the run folder, or by `train.max_minutes`. "
        "A batch system sends a signal when it preempts a job or its time limit is near.",
        "Run the same command with `--resume auto`.",
    ),
    "EXIT_SIGNAL": (
        f"{EXIT_SIGNAL} + n",
        "A second signal `n` ended the run at once, without a checkpoint: 130 for SIGINT, 138 for SIGUSR1, 143 for "
        "SIGTERM.",
        "Run the same command with `--resume auto`. It continues from the newest checkpoint.",
    ),
}

BELOW = """\
`status.json` in the run folder has the exit code too. Under a bare `accelerate launch`, the launcher decides the exit
code of the command; read `status.json` there.
"""


def page() -> str:
    """Return the text of the page."""
    declared = {name for name in vars(errors) if name.startswith("EXIT_")}
    if declared != MEANINGS.keys():
        raise ValueError(f"exit codes without a description: {sorted(declared ^ MEANINGS.keys())}")
    lines = header("Exit codes", "the constants in `ftcli/runtime/errors.py`")
    lines += table(("Code", "Meaning", "What to do"), MEANINGS.values())
    return "\n".join([*lines, "", *BELOW.splitlines()]) + "\n"
