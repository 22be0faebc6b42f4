"""Check a recipe, its profile and its inputs on this machine before a run: `ftcli check`.

The check reads files, packages and devices. plan.py derives the plan. No model is loaded. Light: never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.plan import (
    AUTO_SIZE,
    Plan,
    derive_plan,
    derive_shards,
    describe_best_candidates,
    describe_dropped_rows,
)
from ftcli.launch.machines import Machines, machine_problems
from ftcli.launch.preflight import check_inputs, describe_formats
from ftcli.runtime.errors import EXIT_DONE, InputError, collect_problems
from ftcli.runtime.redaction import redact
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from ftcli.config.profile import Profile
    from ftcli.config.recipe import Recipe
    from ftcli.reports.survey import Survey
    from ftcli.runtime.terminal import Style


BY_TOKENS = "auto: passes by tokens, as many rows as memory allows"  # what `batch.micro_size: auto` means for texts


@dataclass(frozen=True)
class Report:
    """Result of `ftcli check`.

    Attributes:
        recipe: Path of the recipe.
        profile: Name of the profile, or "none".
        plan: Batch sizes, steps and accumulation.
        facts: Further facts by name.
        notes: Remarks, such as limits of exactness.
        data: Survey of the prepared rows, if it was requested.
    """

    recipe: str
    profile: str
    plan: Plan
    facts: dict[str, Any]
    notes: list[str]
    data: Survey | None = None

    @property
    def exit_code(self) -> int:
        """2 if the rows have an error, else 0."""
        return EXIT_DONE if self.data is None else self.data.exit_code

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for `--json`."""
        return {
            "recipe": self.recipe,
            "profile": self.profile,
            "plan": asdict(self.plan),
            **self.facts,
            "notes": self.notes,
            **({} if self.data is None else {"data": self.data.as_dict()}),
        }

    def lines(self, style: Style | None = None) -> list[str]:
        """Return the report as text, one line per fact.

        Args:
            style: Whether the survey of the rows may contain other characters than ASCII; None: it may.
        """
        plan = self.plan
        unknown = "not known until the rows are prepared (ftcli tokenize, or the first train)"
        rows: dict[str, Any] = {
            "recipe": self.recipe,
            "profile": self.profile,
            "processes": plan.processes,
            "rows per step": (
                f"{plan.global_size} in forward passes by tokens, counted once the rows are prepared"
                if plan.passes is None and self.facts.get("micro size") == BY_TOKENS
                else plan.batch_layout
            ),
            "training rows": (
                "read from a stream" if "stream" in self.facts else unknown if plan.rows is None else plan.rows
            ),
            "steps": unknown if plan.steps is None else plan.steps,
            "warm-up steps": unknown if plan.warmup_steps is None else plan.warmup_steps,
            **self.facts,
        }
        width = max(len(name) for name in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows.items()] + [f"note: {note}" for note in self.notes]
        return lines if self.data is None else [*lines, "", *self.data.lines(style)]


def check(
    recipe: str | Path,
    profile: str | Path | None = None,
    *,
    num_processes: int | None = None,
    cpu: bool = False,
    overrides: Sequence[str] = (),
    data: bool = False,
) -> Report:
    """Check a recipe, its inputs on this machine and a profile, and derive the plan, without loading a model.

    Args:
        recipe: A recipe file, or the name of a shipped recipe.
        profile: Name or path of an Accelerate config. None: one process.
        num_processes: Number of processes on all machines. None: the profile's number, else one for each GPU.
        cpu: Check for a run on the CPU.
        overrides: Changes of the recipe such as "train.max_steps=10", applied in order.
        data: Also prepare the rows and survey them. This loads the tokenizer and imports torch.

    Returns:
        The report. `lines()` is its text, `as_dict()` its values.

    Raises:
        InputError: All problems of the recipe, the profile and their combination, or missing data or model files.

    Example:
        >>> report = ftcli.check("recipe.yaml", profile="ddp", num_processes=8)
        >>> for line in report.lines():
        ...     print(line)
        >>> report.plan.steps
    """
    from ftcli.config.compatibility import check_pair, check_trackers
    from ftcli.config.load import find_recipe, load_recipe
    from ftcli.config.profile import load_profile
    from ftcli.data.cached_counts import cached_row_counts
    from ftcli.data.chat.template_variables import recipe_notes
    from ftcli.data.paths import model_folder
    from ftcli.data.revisions import resolve
    from ftcli.data.streaming.corpus import describe_stream
    from ftcli.launch.hub_pushes import check_push_consent
    from ftcli.launch.processes import check_devices, count_processes
    from ftcli.models.positions import position_note

    path = find_recipe(recipe)
    loaded = load_recipe(path, overrides)
    hardware = load_profile(profile) if profile is not None else None
    problems = check_trackers(loaded) + ([] if hardware is None else check_pair(loaded, hardware))
    consent = partial(check_push_consent, loaded, "its folder", trusted=loaded.model.trust_remote_code)
    inputs = [partial(check_inputs, loaded, cpu=cpu), consent]
    if problems := problems + collect_problems(inputs):
        raise InputError(problems)
    too_long = position_note(loaded, model_folder(loaded.model.name))
    survey = _survey(path, overrides) if data else None
    resolved = resolve(loaded)
    loaded = resolved.recipe
    counts = cached_row_counts(loaded)
    machines = 1 if hardware is None else hardware.num_machines
    world = count_processes(hardware, num_processes, cpu=cpu, num_machines=machines)
    if hardware is not None:
        named = Machines(machines, main_ip="known at the launch", main_port=1)
        if problems := machine_problems(hardware, world, named):
            raise InputError(problems)
        derive_shards(*hardware.mesh, world)
    plan = derive_plan(loaded, world, counts.get("train") if counts else None)
    facts, notes = _describe_sizes(loaded, counts)
    if loaded.data.streaming:
        stream, stream_notes = describe_stream(loaded, world)
        facts, notes = stream | facts, stream_notes + notes
    commits = {line.partition(" ")[0] + " at": line.partition(" ")[2] for line in resolved.lines()}
    facts |= {"optimizer": describe_optimizer(loaded)}
    plan, memory, short = _expect_passes(loaded, hardware, plan, cpu=cpu)
    formats = describe_formats(loaded) | (_describe_image_folders(loaded) if data else {})
    facts = formats | commits | facts | memory
    notes += short
    notes += [*_exactness_notes(loaded, plan), *describe_dropped_rows(loaded, plan)]
    notes += describe_best_candidates(loaded, plan)
    notes += [too_long] if too_long else []
    notes += _left_out_losses(loaded)
    notes += [] if data else recipe_notes(loaded)  # the survey of the rows has them too
    notes += [
        f"{problem.what} ({problem.hint})" for problem in check_devices(hardware, world, cpu=cpu, num_machines=machines)
    ]
    if hardware is None:
        notes.append("no profile: trains in one process, on the GPU if there is one")
    name = "none" if hardware is None else hardware.name
    return Report(str(path), name, plan, redact(facts), redact(notes), survey)


def _survey(recipe: Path, overrides: Sequence[str]) -> Survey:
    """Return the survey of the prepared rows, importing what it needs."""
    from ftcli.reports.survey import survey_data

    return survey_data(recipe, overrides=overrides)


def _describe_image_folders(recipe: Recipe) -> dict[str, str]:
    """Return how the labels of each folder of images are read, and its files that are not used. Lists the folders."""
    from ftcli.data.image_folders import list_images
    from ftcli.data.paths import labels_of, local_path

    found: dict[str, str] = {}
    for split, sources in (("train", recipe.data.train_sources), ("eval", recipe.data.eval_sources)):
        for source, label in zip(sources, labels_of(sources), strict=True):
            path = local_path(source.path)
            if path is not None and path.is_dir() and not recipe.data.streaming:
                name = f"data.{split}" + (f" {label}" if len(sources) > 1 else "")
                found[name] = f"{source.path}: {list_images(path).describe() or 'a folder per label'}"
    return found


def _describe_sizes(recipe: Recipe, counts: dict[str, int] | None) -> tuple[dict[str, Any], list[str]]:
    """Return facts and notes about tokens per step, packing, model weights and the size of final/."""
    from ftcli.config.recipe_model import NO_MODEL
    from ftcli.config.task_registry import task_class
    from ftcli.data.paths import model_folder
    from ftcli.data.revisions import hub_notes
    from ftcli.models.files import stored_shapes

    facts: dict[str, Any] = {}
    notes: list[str] = []
    properties = properties_of(task_class(recipe.task))
    if recipe.batch.micro_size == "auto":
        facts["micro size"] = BY_TOKENS
        if recipe.data.streaming or not (properties.needs_tokenizer and properties.reads_text):
            facts["micro size"] = f"auto: measured on the GPUs when the run starts; at most {AUTO_SIZE} without a GPU"
    if properties.needs_tokenizer and properties.reads_text:
        facts["tokens per step"] = f"at most {recipe.batch.global_size * _most_tokens(recipe)}"
    if recipe.data.packing and counts is not None and "documents" in counts:
        tokens = counts["tokens"] / counts["train"]
        facts["tokens per step"] += f", {recipe.batch.global_size * tokens:.0f} on average"
        fill = 100 * tokens / _most_tokens(recipe)
        facts["packing"] = f"{counts['documents']} documents in {counts['train']} rows, {fill:.1f} % full"
    folder = model_folder(recipe.model.name)
    if recipe.model.name == NO_MODEL:
        notes.append("model.name is absent: the task builds its own model")
    elif folder is not None:
        weights = 4 * sum(map(math.prod, stored_shapes(folder).values()))
        if recipe.adapter.type == "none":
            facts["disk for final/"] = f"about {weights / 1e6:.0f} MB"
        else:
            facts["disk for final/"] = "the adapter only, a few MB"
        facts["model weights"] = f"{weights / 1e6:.0f} MB in float32"
    return facts, notes + hub_notes(recipe)


def describe_optimizer(recipe: Recipe) -> str:
    """Return the optimizer and its weight decay."""
    section = recipe.optimizer
    text: str = section.name
    if section.name == "sgd":
        text += f", momentum {section.momentum:g}{', nesterov' * section.nesterov}"
    if not section.weight_decay:
        return f"{text}; no weight decay"
    return f"{text}; weight decay {section.weight_decay:g}, not on biases and norms"


def _most_tokens(recipe: Recipe) -> int:
    """Return the most tokens that a row usually has, before rows are prepared."""
    from ftcli.config.task_registry import task_class

    return recipe.data.max_length * properties_of(task_class(recipe.task)).answers_per_row


def _left_out_losses(recipe: Recipe) -> list[str]:
    """Return a note on losses that a local causal model's configuration asks for and that are not trained."""
    from ftcli.config.task_registry import is_custom_task, task_class
    from ftcli.data.paths import model_folder
    from ftcli.models.frozen_weights import model_settings
    from ftcli.models.router_loss import left_out_losses

    folder = model_folder(recipe.model.name)
    if folder is None or (not is_custom_task(recipe.task) and task_class(recipe.task).peft_type != "CAUSAL_LM"):
        return []
    return left_out_losses(model_settings(folder))


def _expect_passes(
    recipe: Recipe, profile: Profile | None, plan: Plan, *, cpu: bool
) -> tuple[Plan, dict[str, str], list[str]]:
    """Return the plan with the forward passes of a step, the memory estimate of a process, and notes on short rows.

    Passes are those of the rows' lengths, where the rows are prepared.
    """
    from ftcli.config.profile import ShardCounts
    from ftcli.data.cached_counts import cached_lengths
    from ftcli.data.paths import model_folder
    from ftcli.models.estimates.frozen_sharding import choose_frozen
    from ftcli.models.estimates.memory_saving import choose_saving, host_memory_of
    from ftcli.models.estimates.pass_budget import describe_passes
    from ftcli.models.estimates.shape import measure_model
    from ftcli.runtime.devices import gpu_memory

    folder = model_folder(recipe.model.name)
    if folder is None:
        return plan, {}, []
    shares = ShardCounts() if profile is None else profile.shard_counts(plan.processes)
    of_machine = -(-plan.processes // (1 if profile is None else profile.num_machines))
    may_move = profile is None or profile.may_move_embeddings
    hosted: dict[str, Any] = {"host": host_memory_of(of_machine), "may_move_table": may_move}
    tokens, capacity = _most_tokens(recipe), None if cpu else gpu_memory()
    how = dict.fromkeys(("fused", "compiled"), bool(recipe.model.torch_compile))  # left open, the run decides
    sizes, lengths, largest = measure_model(folder, recipe), cached_lengths(recipe), None
    rows = 1 if recipe.batch.micro_size == "auto" else plan.micro_size
    longest = max(lengths) if lengths and not recipe.data.packing else tokens
    compiles = not (shares.is_stage_3 and recipe.adapter.type != "none")  # hooks inside layers
    in_shards = how if compiles else dict.fromkeys(how, False)
    known: dict[str, Any] = how | {"rows": rows, "tokens": longest, "capacity": capacity, "host": hosted["host"]}
    chosen, frozen = choose_frozen(recipe, sizes, shares, in_shards=in_shards, **known)
    shares, how = chosen, in_shards if chosen == shares else how
    facts = {} if frozen is None else {"frozen weights": frozen.removeprefix("frozen weights ")}
    notes: list[str] = []
    if lengths and not recipe.data.packing:
        from ftcli.training.short_rows import expect_passes

        expected = expect_passes(recipe, sizes, shares, plan, lengths, capacity, **hosted, **how)
        plan, largest, notes = expected.plan, expected.tokens, expected.notes
        if expected.budget is not None:
            line = describe_passes(recipe, sizes, shares, expected.budget, tokens=largest, capacity=capacity, **how)
            return plan, facts | {"memory": line.removeprefix("memory ")}, notes
    of_rows: dict[str, Any] = {"tokens": tokens, "capacity": capacity, "largest": largest}
    _, line = choose_saving(recipe, sizes, shares, plan, **of_rows, **hosted, **how)
    return plan, facts | {"memory": line.removeprefix("memory ")}, notes


def _exactness_notes(recipe: Recipe, plan: Plan) -> list[str]:
    """Return notes on settings that give different loss curves on different profiles."""
    notes = []
    if recipe.model.dropout or recipe.adapter.lora_dropout:
        notes.append("dropout above 0: exact only for the same profile, number of processes and micro size")
    elif recipe.model.dropout is None:
        notes.append("model.dropout is absent: the model's own dropout is used; set it to 0 for exactness")
    return notes + _batch_norm_notes(recipe, plan)


def _batch_norm_notes(recipe: Recipe, plan: Plan) -> list[str]:
    """Return a note on what a curve with trained batch normalisation depends on."""
    if (mode := recipe.model.batch_norm) == "frozen":
        return []
    rows = plan.micro_size * (plan.processes if mode == "sync" else 1)
    start = f"batch_norm: {mode}: statistics are those of {rows} rows, of one forward pass"
    if mode == "train":
        return [f"{start} of a process: the curve depends on batch.micro_size"]
    if plan.accumulation == 1:
        return [f"{start} of all processes and of a whole step: exact on any number of processes without accumulation"]
    return [f"{start} of all processes: the curve depends on batch.micro_size and the number of processes"]
