"""Run `ftcli` and `python -m ftcli`: convert the exceptions of a command into text on stderr and an exit code.

0: done. 2: the user's input is wrong. 75: stopped on request, `--resume auto` continues. 128 + signal: ended at once.
1: any other error.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from ftcli.launch.supervisor import LaunchError
from ftcli.runtime.errors import (
    EXIT_FAILED,
    EXIT_INPUT,
    EXIT_RESUME,
    EXIT_SIGNAL,
    InputError,
    RunError,
    RunFolderGoneError,
)
from ftcli.runtime.process import has_ftcli_parent
from ftcli.runtime.redaction import redact
from ftcli.runtime.stop import Stopped, ending_with_process
from ftcli.runtime.terminal import print_text, replace_what_cannot_be_shown
from ftcli.runtime.threads import wait_passively

BUG = (
    "error: ftcli did not expect this exception. If the last lines above do not point to your own code, to a full disk "
    "or to memory, it is a bug in ftcli.\n    Report it with these lines, the output of `ftcli version`, and the recipe"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and exit with the command's code.

    Args:
        arguments: The arguments. None: those of this process.
    """
    from ftcli.cli.app import command_line

    replace_what_cannot_be_shown()
    wait_passively(cpu="--cpu" in (sys.argv[1:] if arguments is None else arguments))  # before torch is loaded
    try:
        with ending_with_process():
            command_line()(args=None if arguments is None else list(arguments), prog_name="ftcli")
    except InputError as error:
        if not _is_printed_elsewhere(error):
            for problem in error.problems:
                print_text(f"error: {problem}", file=sys.stderr)
        sys.exit(EXIT_INPUT)
    except RunError as error:
        if not _is_printed_elsewhere(error):
            print_text(f"error: {redact(str(error))}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except LaunchError as error:  # the error of the failing rank is already on stderr
        sys.exit(error.exit_code)
    except Stopped as stopped:
        print_text(f"ftcli: {stopped}: stopped before anything was started", file=sys.stderr)
        sys.exit(EXIT_RESUME)
    except KeyboardInterrupt:
        print_text("interrupted", file=sys.stderr)
        sys.exit(EXIT_SIGNAL + signal.SIGINT)
    except Exception as error:
        if not _is_printed_elsewhere(error):
            print_text(redact(traceback.format_exc()), end="", file=sys.stderr)
            print_text(BUG, file=sys.stderr)
        sys.exit(EXIT_FAILED)


def _is_printed_elsewhere(error: Exception) -> bool:
    """Return whether the parent ftcli or another rank prints this error for all ranks."""
    if not has_ftcli_parent() and isinstance(error, InputError | RunError):
        return _is_printed_by_another_rank(str(error))
    is_reported = getattr(error, "recorded", False) or isinstance(error, RunFolderGoneError)  # the parent checks it too
    return has_ftcli_parent() and is_reported


def _is_printed_by_another_rank(text: str) -> bool:
    """Return whether another rank on this machine prints the same text, in a launch without ftcli."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # of torchrun: LAUNCH_FOLDER/LOCAL_RANK/error.json
    if error_file is None:
        return False
    marker = Path(error_file).parent.parent / f"ftcli-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:  # if the folder is not writable, every rank prints the text
        return False
    return False


if __name__ == "__main__":
    main()
