"""Report keys of a recipe that have no effect because of its other keys.

A key counts as set if its value is not the default, so that a recipe with every key written out stays valid. Reads only
the recipe. Checks that need files of this machine are in reports/check.py. Light: imports no library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftcli.config.row_formats import columns_of_kinds
from ftcli.config.yaml_document import Keys
from ftcli.runtime.errors import Problem, nearest
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.config.section import Section


TASK_TYPE = Any  # a class that satisfies tasks.protocol.Task
ADAPTER = "without an adapter: the whole model is trained"
ADAPTER_HINT = "set adapter.type to lora, or delete the section adapter (--set 'adapter={type: none}')"
NO_ROWS = "without evaluation rows or prompts"
NO_ROWS_HINT = "set data.eval, data.eval_rows or evaluate.generate, or delete it"
HUB_HINT = "set hub.push to the name of a repository, or delete it"
SGD_HINT = "set optimizer.name to sgd, or delete it; the rates of AdamW's moments are optimizer.betas"
STREAM = "with data.streaming: a stream has no last step of an epoch"
NOT_TEXT = "for task {task}, whose rows are not text"


@dataclass(frozen=True)
class Rule:
    """One key, the condition under which it has no effect, and the text of the message."""

    key: str
    is_ineffective: Callable[[Recipe], bool]
    reason: str
    hint: str = "delete it"


def _has_no_adapter(recipe: Recipe) -> bool:
    return recipe.adapter.type == "none"


def _evaluates_nothing(recipe: Recipe) -> bool:
    data = recipe.data
    return not data.eval_sources and not data.eval_rows and recipe.evaluate.generate is None


def _stops_at_non_finite(recipe: Recipe) -> bool:
    return recipe.faults.non_finite == "stop"


def _decodes_greedily(recipe: Recipe) -> bool:
    return recipe.evaluate.generate is not None and recipe.evaluate.generate.temperature == 0


def _trains_in_another_dtype(recipe: Recipe) -> bool:
    trained = "bfloat16" if recipe.precision == "bf16_pure" else "float32"
    return recipe.adapter.type == "none" and recipe.model.dtype != trained


def _columns_are_replaced(recipe: Recipe) -> bool:
    return all(source.columns for source in recipe.data.train_sources + recipe.data.eval_sources)


RULES = (
    *(
        Rule(f"adapter.{key}", _has_no_adapter, ADAPTER, ADAPTER_HINT)
        for key in (
            "r",
            "lora_alpha",
            "lora_dropout",
            "target_modules",
            "exclude_modules",
            "modules_to_save",
            "use_rslora",
            "use_dora",
            "loraplus_lr_ratio",
        )
    ),
    Rule(
        "model.dtype",
        _trains_in_another_dtype,
        "without an adapter: no weight is frozen, and trained weights are float32 (bf16_pure: bfloat16)",
        "delete it; precision sets the dtype of the computation",
    ),
    Rule("model.embeddings_on_host", _has_no_adapter, "without an adapter: no weight is frozen"),
    Rule("model.shard_frozen", _has_no_adapter, "without an adapter: no weight is frozen"),
    *(
        Rule(f"optimizer.{key}", lambda recipe: recipe.optimizer.name == "sgd", "with optimizer.name sgd")
        for key in ("betas", "eps")
    ),
    *(
        Rule(f"optimizer.{key}", lambda recipe: recipe.optimizer.name != "sgd", "with AdamW", SGD_HINT)
        for key in ("momentum", "nesterov")
    ),
    Rule("schedule.min_ratio", lambda recipe: recipe.schedule.name == "constant", "with schedule.name constant"),
    Rule("evaluate.every_steps", _evaluates_nothing, NO_ROWS, NO_ROWS_HINT),
    Rule("evaluate.at_start", _evaluates_nothing, NO_ROWS, NO_ROWS_HINT),
    Rule(
        "evaluate.generate.top_p",
        _decodes_greedily,
        "with temperature 0: the most likely token is always taken",
        "set evaluate.generate.temperature above 0, or delete it",
    ),
    *(
        Rule(f"faults.{key}", _stops_at_non_finite, "with faults.non_finite stop: the first such step ends the run")
        for key in ("max_in_a_row", "max_in_all")
    ),
    Rule("data.columns", _columns_are_replaced, "where every source has columns of its own"),
    Rule("data.drop_last", lambda recipe: recipe.data.streaming, STREAM),
    *(
        Rule(f"hub.{key}", lambda recipe: recipe.hub.push is None, "without hub.push: nothing is uploaded", HUB_HINT)
        for key in ("push_at", "private")
    ),
    Rule(
        "data.padding_free",
        lambda recipe: recipe.data.packing and recipe.data.padding_free is False,
        "with data.packing, which concatenates rows without padding",
        "delete it, or set data.packing to false",
    ),
)
# Keys for rows of text, which the tasks of other rows ignore.
TEXT_RULES = ("data.max_length", "data.group_by_length", "data.truncation", "data.padding_free", "model.new_tokens")


def ineffective_key_problems(
    recipe: Recipe, where: Callable[[Keys], str], task: TASK_TYPE | None = None
) -> Iterator[Problem]:
    """Yield one problem for each key that has no effect.

    Args:
        recipe: A valid recipe.
        where: Function that returns the place (`file:line`) of a key path.
        task: Class of the recipe's task; None for a custom task, whose keys are not checked.

    Yields:
        Problems with place and hint.
    """
    for rule in RULES:
        if rule.is_ineffective(recipe) and _is_set(recipe, rule.key.split(".")):
            yield _problem(rule.key, rule.reason, rule.hint, where)
    yield from warmup_problems(recipe, where)
    if task is None:
        return
    if not properties_of(task).reads_text:
        for key in TEXT_RULES:
            if _is_set(recipe, key.split(".")):
                yield _problem(key, NOT_TEXT.format(task=recipe.task), "delete it", where)
    yield from _unknown_columns(recipe, where, known_columns(task))


def known_columns(task: TASK_TYPE) -> list[str]:
    """Return the names of all columns that rows of a shipped task may have."""
    if task.columns:
        return [*task.columns, *properties_of(task).optional_columns, "id"]
    return [*columns_of_kinds(properties_of(task).formats), "id"]


def warmup_problems(recipe: Recipe, where: Callable[[Keys], str] = lambda keys: "") -> Iterator[Problem]:
    """Yield a problem for a number of warm-up steps that is not whole, and would be rounded.

    Args:
        recipe: The recipe.
        where: Function that returns the place (`file:line`) of a key path.
    """
    steps = recipe.schedule.warmup_steps
    if steps > 1 and steps != int(steps):
        reason = "after its decimal point: 1 or more is a number of whole steps"
        yield _problem("schedule.warmup_steps", reason, "write a whole number, or a fraction of the run below 1", where)


def _unknown_columns(recipe: Recipe, where: Callable[[Keys], str], known: list[str]) -> Iterator[Problem]:
    """Yield one problem for each column map that names a column which the task does not read."""
    data = recipe.data
    maps: list[tuple[Keys, Iterable[str]]] = [(("data", "columns"), data.columns)]
    for split, value in (("train", data.train), ("eval", data.eval)):
        for index, source in enumerate(value if isinstance(value, list) else [] if value is None else [value]):
            path = ("data", split, index) if isinstance(value, list) else ("data", split)
            maps.append(((*path, "columns"), source.columns))
    for keys, columns in maps:
        for name in columns:
            if name not in known:
                message = f"{'.'.join(map(str, keys))}: task {recipe.task} reads no column '{name}'"
                hint = nearest(name, known) or f"it reads {', '.join(known)}"
                yield Problem(message, where((*keys, name)), hint)


def _is_set(recipe: Recipe, keys: list[str]) -> bool:
    """Return whether the value of a key differs from its default."""
    section: Section = recipe
    for key in keys[:-1]:
        inner = getattr(section, key)
        if inner is None:
            return False
        section = inner
    field = type(section).model_fields[keys[-1]]
    return bool(getattr(section, keys[-1]) != field.get_default(call_default_factory=True))


def _problem(key: str, reason: str, hint: str, where: Callable[[Keys], str]) -> Problem:
    """Return the problem of a key that has no effect."""
    return Problem(f"{key} has no effect {reason}", where(tuple(key.split("."))), hint)
