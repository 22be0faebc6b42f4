"""Generate reference/cli.md: every command with its arguments and options, read from the Typer program."""

from __future__ import annotations

from typing import Any

from markup import code, header, table

from ftcli.cli.app import command_line

HEAD = """\
`ftcli COMMAND --help` prints the same information in the terminal. Results go to standard output, log lines and
errors to standard error. The [exit codes](exit-codes.md) are the same for all commands.

`RECIPE` is a recipe file or the name of a recipe that comes with ftcli (`ftcli show recipes`). `--profile` takes
the name of a profile that comes with ftcli (`ftcli show profiles`) or an Accelerate configuration file.
"""


def page() -> str:
    """Return the text of the page."""
    program = command_line()
    lines = header("Command line", "the Typer commands of `ftcli`")
    lines += [*HEAD.splitlines(), ""]
    commands = {name: command for name, command in program.commands.items() if not command.hidden}
    rows = [(f"[`{name}`](#ftcli-{name})", _sentences(command)[0]) for name, command in commands.items()]
    lines += table(("Command", "Purpose"), rows)
    for name, command in commands.items():
        lines += ["", *_command(name, command)]
    return "\n".join(lines) + "\n"


def _command(name: str, command: Any) -> list[str]:
    visible = [item for item in command.params if not item.hidden]
    arguments = [item for item in visible if item.param_type_name == "argument"]
    options = [item for item in visible if item.param_type_name == "option"]
    usage = " ".join(_usage(item) for item in arguments)
    lines = [f"## ftcli {name}", ""]
    for sentence in _sentences(command):
        lines += [sentence, ""]
    lines += ["```text", f"ftcli {name} {'[OPTIONS] ' if options else ''}{usage}".rstrip(), "```"]
    if arguments:
        lines += ["", *table(("Argument", "Meaning"), [(code(item.metavar), item.help or "") for item in arguments])]
    if options:
        lines += ["", *table(("Option", "Meaning", "Default"), [_option(item) for item in options])]
    return lines


def _sentences(command: Any) -> list[str]:
    """Return the paragraphs of a command's help: its docstring, then what stands below the options."""
    text = command.help or ""
    below = command.epilog or ""
    first = text.removesuffix(below).strip()
    return [first, *([below] if below else [])]


def _usage(item: Any) -> str:
    name = f"{item.metavar}..." if item.nargs == -1 else item.metavar
    return name if item.required else f"[{name}]"


def _option(item: Any) -> tuple[str, str, str]:
    named = " ".join([", ".join(item.opts), *([] if item.is_flag else [item.metavar or item.name.upper()])])
    if item.required:
        default = "*required*"
    elif item.is_flag or item.default is None:
        default = ""
    else:
        default = code(str(item.default))
    limits = [f"at least {item.min}" if item.min is not None else "", f"at most {item.max}" if item.max else ""]
    limited = " and ".join(limit for limit in limits if limit)
    return code(named), f"{item.help} {limited.capitalize()}.".strip() if limited else item.help, default
