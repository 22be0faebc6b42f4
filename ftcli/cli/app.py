"""Define the command line: its commands, in the order of the help text. Nothing heavy is imported.

recipe_commands.py, plan_command.py, submit_command.py and trace_command.py have the commands that take a recipe,
doctor_command.py the one for machines, report_commands.py those for reports, run_commands.py the others. A command
parses its options, calls one function and prints: data to stdout, everything else to stderr. __main__.py has the exit
codes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import typer
import typer.core

from ftcli.cli import (
    doctor_command,
    plan_command,
    recipe_commands,
    report_commands,
    run_commands,
    submit_command,
    trace_command,
)
from ftcli.runtime.errors import CLOSE, nearest, shortened


class _Commands(typer.core.TyperGroup):
    """Commands that suggest a similar name for an unknown one, by the same rule as for keys of recipes."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name. Fail with a suggestion if the name is unknown."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            ctx.fail(f"No such command '{shortened(args[0], 60)}'. {nearest(args[0], self.commands, CLOSE)}".strip())
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    name="ftcli",
    help="Fine-tune a model: a recipe defines the training, a profile defines the hardware.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.command(epilog=recipe_commands.TRAIN_CODES)(recipe_commands.train)
for command in (
    recipe_commands.check,
    plan_command.plan,
    doctor_command.doctor,
    submit_command.submit,
    recipe_commands.preview,
    recipe_commands.parity,
    trace_command.trace,
    recipe_commands.init,
    recipe_commands.fetch,
    recipe_commands.tokenize,
    run_commands.evaluate,
    run_commands.export,
    run_commands.generate,
    run_commands.chat,
    run_commands.show,
    report_commands.report,
    report_commands.compare,
    recipe_commands.schema,
    recipe_commands.quickstart,
    run_commands.version,
):
    app.command()(command)


@cache
def command_line() -> Any:
    """Return the program as a click command, built once per process."""
    return typer.main.get_command(app)
