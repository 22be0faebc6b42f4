"""Survey all prepared rows of a recipe, for `ftcli preview` and `ftcli check --data`.

row_statistics.py measures the rows, findings.py finds problems. This module computes plain values per split, per source
and per epoch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ftcli.data.sampler import TrainOrder, epoch_order
from ftcli.reports.survey_types import Prepared
from ftcli.runtime.errors import EXIT_DONE, EXIT_INPUT
from ftcli.runtime.redaction import redact
from ftcli.runtime.seeds import PADDING

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.data.cache import PreparedRows
    from ftcli.reports.row_statistics import Measures
    from ftcli.reports.survey_types import Finding
    from ftcli.runtime.terminal import Style


COUNT_NAMES = (
    "cut",
    "dropped",
    "split",
    "weightless",
    "untrained",
    "bad",
)  # of raw rows in meta.json


@dataclass(frozen=True)
class Survey:
    """Statistics and problems of all prepared rows.

    Attributes:
        recipe: Path of the recipe, or its task.
        findings: The problems.
        statistics: Plain values by split.
    """

    recipe: str
    findings: list[Finding]
    statistics: dict[str, Any]

    @property
    def exit_code(self) -> int:
        """2 if a finding is an error, else 0."""
        return EXIT_INPUT if any(finding.level == "error" for finding in self.findings) else EXIT_DONE

    def as_dict(self) -> dict[str, Any]:
        """Return findings and statistics as plain values."""
        findings = [finding.as_dict() for finding in self.findings]
        return {"recipe": self.recipe, "findings": findings, "statistics": self.statistics}

    def lines(self, style: Style | None = None) -> list[str]:
        """Return findings and statistics as text, findings first."""
        from ftcli.reports.preview_text import draw_findings, draw_statistics
        from ftcli.runtime.terminal import Style

        style = style or Style()
        return draw_findings(self.findings, style) + draw_statistics(self.statistics, style)


def survey_data(recipe: Recipe | str | Path, *, overrides: Sequence[str] = ()) -> Survey:
    """Survey all training and evaluation rows of a recipe. It loads a tokenizer and no model.

    Rows are prepared if the cache does not have them.

    Args:
        recipe: A recipe file, the name of a shipped recipe, or a `Recipe`.
        overrides: Changes of the recipe, applied in order.

    Raises:
        InputError: Rows cannot be prepared.
    """
    return survey(prepare_data(recipe, overrides))


def prepare_data(recipe: Recipe | str | Path, overrides: Sequence[str] = ()) -> Prepared:
    """Return the prepared rows of a recipe, building their cache if necessary."""
    from ftcli.config.load import find_recipe, load_recipe
    from ftcli.config.recipe import Recipe
    from ftcli.config.task_registry import refresh_task
    from ftcli.data.cache import prepare_rows
    from ftcli.data.revisions import resolve
    from ftcli.hardware.environment import quiet_libraries
    from ftcli.tasks.build import build_task

    name = recipe.task if isinstance(recipe, Recipe) else str(find_recipe(recipe))
    loaded = resolve(recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)).recipe
    quiet_libraries()
    refresh_task(loaded.task)
    task = build_task(loaded)
    return Prepared(name, loaded, task, prepare_rows(loaded, task))


def survey(prepared: Prepared) -> Survey:
    """Survey prepared rows."""
    from ftcli.data.chat.control_tokens import find_spelled_tokens
    from ftcli.reports.findings import judge, too_long_rows
    from ftcli.reports.full_lengths import measure_full_length
    from ftcli.reports.row_statistics import measure, read_vocabulary

    recipe, task, rows = prepared.recipe, prepared.task, prepared.rows
    tokenizer = getattr(task, "tokenizer", None)
    vocabulary = None if tokenizer is None else read_vocabulary(tokenizer, _generation_ends(recipe))
    answers = tuple(getattr(task, "answer_columns", ()))
    splits = {"train": rows.train} | ({} if rows.eval is None else {"eval": rows.eval})
    measures = {
        name: measure(part, vocabulary, answers=answers, title=f"counting {name} rows") for name, part in splits.items()
    }
    statistics: dict[str, Any] = {
        name: _survey_split(prepared, name, part, measures[name]) for name, part in splits.items()
    }
    if too_long_rows(statistics["train"]) and (full := measure_full_length(prepared)) is not None:
        statistics["train"]["full_length"] = full.as_dict()
    if not rows.streamed:
        statistics["train"]["epoch"] = _survey_epoch(prepared, measures["train"])
    if "eval" in measures:
        statistics["eval"]["overlap"] = _overlap(measures)
    for name, spelled in find_spelled_tokens(recipe, task).items():
        statistics[name]["control_tokens"] = spelled.as_dict()
    findings = judge(prepared, measures, statistics, stored_notes(rows))
    return Survey(prepared.name, findings, statistics)


def _survey_split(prepared: Prepared, name: str, rows: Any, measures: Measures) -> dict[str, Any]:
    """Return the statistics of a split."""
    from ftcli.reports.row_statistics import count_contradictions, count_duplicates, histogram, percentiles

    limit = prepared.recipe.data.max_length
    values: dict[str, Any] = {"rows": len(measures), **_count_tokens(rows, measures), "sources": {}}
    for index, label in enumerate(source_names(prepared, name)):
        in_source = measures.source == index
        values["sources"][label] = {"rows": int(in_source.sum()), **_count_tokens(rows, measures, in_source)}
    repeated, _ = count_duplicates(measures)
    values["duplicates"] = repeated
    if hasattr(prepared.task, "answer_columns"):
        values["contradictions"] = count_contradictions(measures)
    if "input_ids" in rows.column_names:
        values |= {"lengths": percentiles(measures.length), "histogram": histogram(measures.length)}
        values["at_max_length"] = int((measures.longest >= limit).sum())
        values["longest"] = int(measures.longest.max())
    if counts := stored_counts(prepared.rows, name):
        values["counts"] = counts
    if hasattr(prepared.task, "count_answers"):
        values["answers"] = prepared.task.count_answers(rows, prepared.rows.facts)
    return values


def _count_tokens(rows: Any, measures: Measures, where: Any = slice(None)) -> dict[str, Any]:
    """Return the number of tokens, and the number and fraction of trained tokens if rows mark them."""
    if "input_ids" not in rows.column_names:
        return {}
    tokens, trained = int(measures.length[where].sum()), int(measures.trained[where].sum())
    if "trained" not in rows.column_names:
        return {"tokens": tokens}
    return {"tokens": tokens, "trained_tokens": trained, "trained_share": round(trained / max(tokens, 1), 4)}


def _survey_epoch(prepared: Prepared, measures: Measures) -> dict[str, Any]:
    """Return steps, left-over rows, padding and packing of one epoch on one process."""
    from ftcli.config.plan import derive_batches, micro_size_limit
    from ftcli.data.packing import row_capacity
    from ftcli.reports.row_statistics import padding_share

    recipe, bins, order = prepared.recipe, packed_bins(prepared.rows), first_epoch(prepared)
    units = len(measures) if bins is None else len(bins)
    values: dict[str, Any] = {"steps": len(order), "left_over": units - int((order != PADDING).sum())}
    if not measures.length.any():
        return values
    micro, _ = derive_batches(recipe.batch.global_size, micro_size_limit(recipe), 1)
    unpacked = order[order != PADDING] if bins is None else epoch_order(len(measures), recipe.seed, 0)
    share = padding_share(measures.length[unpacked], micro, measures.longest[unpacked], measures.sides[unpacked])
    values |= {"padding_share": round(share, 4), "micro_size": micro}
    values["is_padded"] = bins is None and not getattr(recipe.data, "padding_free", False)
    if bins is not None:
        fill = float(measures.length.sum()) / (len(bins) * row_capacity(prepared.rows.train, recipe.data.max_length))
        values |= {"bins": len(bins), "fill": round(fill, 4)}
    return values


def epoch_and_run(prepared: Prepared) -> tuple[int, int]:
    """Return the number of steps of an epoch and of the run.

    Raises:
        InputError: The rows are too few for one step.
    """
    from ftcli.config.plan import derive_steps

    recipe, bins = prepared.recipe, packed_bins(prepared.rows)
    units = len(prepared.rows.train) if bins is None else len(bins)
    steps = derive_steps(recipe.train, units, recipe.batch.global_size, drop_last=recipe.data.drop_last)
    assert steps[0] is not None and steps[1] is not None  # the number of rows is known
    return steps[0], steps[1]


def first_epoch(prepared: Prepared) -> NDArray[np.int64]:
    """Return the row indices of the first epoch, `[steps, rows per step]`, in the order of a run."""
    recipe, rows, bins = prepared.recipe, prepared.rows, packed_bins(prepared.rows)
    size, (steps, _) = recipe.batch.global_size, epoch_and_run(prepared)
    lengths = getattr(rows, "lengths", None)
    order = TrainOrder(
        len(rows.train) if bins is None else len(bins),
        global_size=size,
        micro_size=size,
        seed=recipe.seed,
        first_step=0,
        steps=steps,
        steps_per_epoch=steps,
        **({} if lengths is None else {"lengths": lengths}),
    )
    return np.array([[key[1] for key in step] for step in order], np.int64)


def _overlap(measures: dict[str, Measures]) -> dict[str, Any]:
    from ftcli.reports.row_statistics import count_overlap

    exact, prompt = count_overlap(measures["train"], measures["eval"])
    return {"exact": exact, "same_prompt": prompt}


def source_names(prepared: Prepared, split: str) -> list[str]:
    """Return the names of a split's sources. The column `source` of rows is an index into them."""
    if labels := getattr(prepared.rows, "labels", {}).get(split):
        return list(labels)
    data = prepared.recipe.data
    sources: Any = data.train if split == "train" or data.eval is None else data.eval
    return [redact(source.path) for source in (sources if isinstance(sources, list) else [sources])]


def packed_bins(rows: PreparedRows) -> Any:
    """Return the packed rows as lists of row indices; None without packing."""
    return getattr(rows, "bins", None)


def stored_counts(rows: PreparedRows, split: str) -> dict[str, int]:
    """Return how many raw rows of a split were cut, split or left out, such as {"cut": 3}; empty if unknown."""
    meta = json.loads((rows.folder / "meta.json").read_text())
    totals: dict[str, int] = {}
    for counts in meta.get("counts", []):
        for name in COUNT_NAMES:
            if counts["of"] == split and (number := counts.get(name, 0)):
                totals[name] = totals.get(name, 0) + (len(number) if isinstance(number, list) else number)
    return totals


def stored_notes(rows: PreparedRows) -> list[tuple[str, str]]:
    """Return (what was found, what to do) about the labels of raw rows, as it was logged when they were prepared."""
    meta = json.loads((rows.folder / "meta.json").read_text())
    return [(what, hint) for what, hint in meta.get("notes", [])]


def _generation_ends(recipe: Recipe) -> list[int]:
    """Return the end tokens in the generation_config.json of a local model."""
    from ftcli.data.paths import model_folder

    folder = model_folder(recipe.model.name)
    path = None if folder is None else folder / "generation_config.json"
    if path is None or not path.is_file():
        return []
    ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return [] if ids is None else ids if isinstance(ids, list) else [ids]
