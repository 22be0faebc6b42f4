"""Write the job script of a run for a batch system, from a template that the user may replace.

A template is plain text in the language of Jinja: `{{ nodes }}` is replaced by a value. docs/how-to has the list of
placeholders. submit.py checks the run and gives the script to the batch system. Light: never imports torch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox

from ftcli.config.trust import FLAG
from ftcli.runtime.errors import InputError, Problem, nearest
from ftcli.runtime.redaction import redact
from ftcli.runtime.resources import PACKAGE

TEMPLATES = {"slurm": "slurm.sh.jinja", "kubernetes": "kubernetes.yaml.jinja"}
SIGNAL_SECONDS = 120  # for the checkpoint, between the signal and the end of the job
MOST_NAME = 40  # characters of a job's name: the names of its pods have at most 63


@dataclass(frozen=True)
class Job:
    """A checked run, as a job on a cluster.

    Attributes:
        name: Name of the job, of letters, digits and hyphens.
        folder: Folder that the commands run in.
        recipe: Recipe as the job finds it: a path, or the name of a shipped one.
        profile: Profile as the job finds it; None: one process.
        output: Run folder as the job finds it.
        nodes: Number of machines.
        gpus_per_node: GPUs of each machine; 0 for a run on the CPU.
        num_processes: Processes of all machines together.
        seconds: Time limit in seconds; None: the limit of the batch system.
        overrides: Changes of the recipe.
        trust_remote_code: Whether the commands run Python code of the model or the task.
    """

    name: str
    folder: Path
    recipe: str
    profile: str | None
    output: str
    nodes: int
    gpus_per_node: int
    num_processes: int
    seconds: int | None
    overrides: Sequence[str]
    trust_remote_code: bool

    def values(self, ftcli: str) -> dict[str, Any]:
        """Return the values of all placeholders that ftcli knows.

        Args:
            ftcli: Shell words that start ftcli.
        """
        hardware = [] if self.profile is None else ["--profile", self.profile]
        hardware += ["--num-processes", str(self.num_processes)] if self.profile is not None else []
        hardware += ["--cpu"] * (self.gpus_per_node == 0)
        changes = [f"--set={change}" for change in self.overrides] + [FLAG] * self.trust_remote_code
        run = [self.recipe, *hardware, *changes]
        seconds = self.seconds or 0
        return {
            "name": self.name,
            "folder": shlex.quote(str(self.folder)),
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "num_processes": self.num_processes,
            "time": f"{seconds // 3600}:{seconds % 3600 // 60:02}:00" if seconds else "",
            "time_seconds": seconds,
            "signal_seconds": min(SIGNAL_SECONDS, seconds // 2) if seconds else SIGNAL_SECONDS,
            "ftcli": ftcli,
            "check": f"{ftcli} {shlex.join(['check', *run])}",
            "doctor": f"{ftcli} {shlex.join(['doctor', *hardware])}",
            "train": f"{ftcli} {shlex.join(['train', *run, '--output', self.output, '--resume', 'auto'])}",
        }


def job_name(output: Path) -> str:
    """Return the name of a job: the run folder's, in letters, digits and hyphens that every batch system accepts."""
    name = re.sub(r"[^a-z0-9]+", "-", output.name.lower())[:MOST_NAME].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def parse_time(text: str) -> int:
    """Return the seconds of a time limit in hours and minutes, such as "4:00".

    Raises:
        InputError: The text has another form, or the time is zero.
    """
    match = re.fullmatch(r"(\d{1,4}):([0-5]\d)", text)
    if match is None or not (seconds := int(match[1]) * 3600 + int(match[2]) * 60):
        raise InputError(f"--time {text}: not a time in hours and minutes", hint="write H:MM, such as 4:00 or 48:00")
    return seconds


def parse_placeholders(items: Sequence[str]) -> dict[str, str]:
    """Return name -> value of NAME=VALUE items.

    Raises:
        InputError: An item has another form.
    """
    wrong = [item for item in items if not item.partition("=")[0].isidentifier() or "=" not in item]
    if wrong:
        raise InputError([Problem(f"--placeholder {item}: not NAME=VALUE", hint="partition=gpu") for item in wrong])
    return {item.partition("=")[0]: item.partition("=")[2] for item in items}


def render_job(job: Job, system: str, template: Path | None, placeholders: Mapping[str, str], ftcli: str) -> str:
    """Return the job script.

    Args:
        job: The checked run.
        system: "slurm" or "kubernetes".
        template: File of the user. None: the template of ftcli.
        placeholders: Values of further placeholders. `ftcli` replaces the command that starts ftcli.
        ftcli: Shell words that start ftcli in the job.

    Raises:
        InputError: The template cannot be read, is wrong or has an unknown placeholder; a name is already in use; or
            the script would hold a credential.
    """
    path = template or PACKAGE / "launch" / "templates" / TEMPLATES[system]
    where = "--placeholder" if template is None else str(template)
    values = job.values(placeholders.get("ftcli", ftcli))
    further = {name: value for name, value in placeholders.items() if name != "ftcli"}
    if known := sorted(values.keys() & further.keys()):
        raise InputError(
            f"--placeholder {known[0]}: ftcli sets this placeholder itself",
            hint="use the options of ftcli submit instead",
        )
    text = _render(path, where, values, further)
    lines = text.splitlines()
    secret = [number for number, line in enumerate(lines, 1) if redact(line) != line]
    if secret or redact(text) != text:
        place = f"line {secret[0]} of the job script" if secret else "the job script"
        raise InputError(
            f"{place} would hold a credential, and others can read job scripts",
            hint="put it into the environment, or into the recipe file; a Kubernetes job gets the secret named ftcli",
        )
    return text


def _render(path: Path, where: str, values: dict[str, Any], further: Mapping[str, str]) -> str:
    """Return a template with the values of its placeholders.

    Raises:
        InputError: The template is wrong, placeholders have no value, or it has none with a name in `further`.
    """
    missing: list[str] = []
    values = values | dict(further)

    class Missing(jinja2.Undefined):
        def __str__(self) -> str:
            missing.append(str(self._undefined_name))
            return ""

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        undefined=Missing, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    environment.filters["tojson"] = _json
    try:
        template = environment.parse(path.read_text(encoding="utf-8"))
        read = jinja2.meta.find_undeclared_variables(template)
        text = environment.from_string(template).render(values)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"--template {path}: {reason}") from error
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"the template is wrong: {error.message}", where=f"{where}:{error.lineno}") from error
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
        raise InputError(f"the template is wrong: {error}", where=where) from error
    if missing:
        known = ", ".join(sorted(values))
        hint = f"give each a value: --placeholder {missing[0]}=VALUE; known: {known}"
        raise InputError(f"no value for placeholder {', '.join(dict.fromkeys(missing))}", where=where, hint=hint)
    unread = [
        Problem(f"--placeholder {name}: {path.name} has no such placeholder", hint=nearest(name, sorted(read)))
        for name in further
        if name not in read
    ]
    if unread:
        raise InputError(unread)
    return text


def _json(value: object) -> str:
    """Return a text as a JSON string, which YAML reads too. An undefined one is recorded as missing by `str`."""
    import json

    return json.dumps(str(value))
