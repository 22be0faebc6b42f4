"""Start Accelerate's launcher for `ftcli train` with the same command line, but without its stack trace at the end.

When a rank fails, torchrun raises an error. Its text repeats the output of the rank, below a stack trace of torchrun's
functions. The parent process already reports which rank failed and why, so only the exit code is kept.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run `accelerate launch` with the arguments of this process, and exit with the code of the first failed rank.

    Other errors of the launcher are raised as they are.
    """
    from accelerate.commands.launch import main as launch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch()
    except ChildFailedError as error:
        first = error.get_first_failure()[1]
        sys.exit(first.exitcode if first.exitcode > 0 else 1)


if __name__ == "__main__":
    main()
