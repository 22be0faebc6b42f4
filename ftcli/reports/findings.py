"""Find problems of prepared rows from their statistics, each with a remedy.

An error is never intended, a warning may be intended, and a note only explains. Of files, only a model's configuration
is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ftcli.data.chat.template_variables import date_finding, texts_of
from ftcli.data.paths import model_folder
from ftcli.models.frozen_weights import model_settings
from ftcli.models.token_ids import embedding_rows, token_problem
from ftcli.reports.row_statistics import count_duplicates, examples
from ftcli.reports.survey_types import Finding, Level
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from ftcli.reports.row_statistics import Measures
    from ftcli.reports.survey_types import Prepared


LEVELS: tuple[Level, ...] = ("error", "warning", "note")

# Fractions above which a problem is reported.
MANY_DUPLICATES = 0.05  # of the training rows
OVERLAP = 0.01  # of the evaluation rows are also training rows, which makes metrics too good by about that fraction
MOSTLY_OVERLAP = 0.5
MOSTLY_CUT = 0.5
UNTRAINED = 0.01  # of the rows have no trained token
RARE_CHARACTERS = 1 / 3  # of the usual characters in a token
CONTRADICTIONS = 0.01  # of the rows have another answer than a row with the same input
ONE_SIDED = 0.95  # of the answers are the same


def judge(
    prepared: Prepared,
    measures: dict[str, Measures],
    statistics: dict[str, Any],
    notes: Sequence[tuple[str, str]] = (),
) -> list[Finding]:
    """Find the problems of prepared rows.

    Args:
        prepared: The recipe, its task and its rows.
        measures: Measures of the rows, by split.
        statistics: Statistics of the rows, by split.
        notes: What was found in labels when the rows were prepared, and what to do.

    Returns:
        The findings. Mostly truncated rows come first, because the other findings describe what is left of the rows.
        Then errors come first.
    """
    train, values = measures["train"], statistics["train"]
    findings = [Finding("warning", *note) for note in notes]
    findings += [*_find_duplicates(train), *_find_answer_problems(prepared, values)]
    if "trained_tokens" in values:
        findings += [
            *_find_untrained_rows(prepared, train),
            *_find_missing_ends(prepared, train),
            *_find_template_problems(prepared, train),
        ]
    if "tokens" in values:
        findings += _find_unusual_text(train)
    if "eval" in measures:
        findings += _find_overlap(len(measures["eval"]), **statistics["eval"]["overlap"])
    findings += _find_tokens_without_embedding(prepared)
    findings += _find_spelled_tokens(statistics)
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return [*_find_long_rows(prepared, values), *findings]


def _find_tokens_without_embedding(prepared: Prepared) -> Iterator[Finding]:
    """Find tokens that are not in the table of embeddings of a local model, by its configuration."""
    name = prepared.recipe.model.name
    folder, tokenizer = model_folder(name), getattr(prepared.task, "tokenizer", None)
    size = None if folder is None or prepared.recipe.model.new_tokens else embedding_rows(model_settings(folder))
    if size is not None and (problem := token_problem(size, name, tokenizer, prepared.rows)) is not None:
        yield Finding("error" if problem.hint else "warning", problem.what, problem.hint)


def share(part: int, whole: int) -> str:
    """Return a count with its percentage, such as "12 of 400 rows (3.0 %)"."""
    return f"{part} of {whole} rows ({100 * part / max(whole, 1):.1f} %)"


def _find_duplicates(train: Measures) -> Iterator[Finding]:
    repeated, copies = count_duplicates(train)
    if len(train) > 1 and repeated == len(train) - 1:
        yield Finding("error", f"all {len(train)} training rows are the same", "is data.train the right file?")
    elif repeated > MANY_DUPLICATES * len(train):
        where = np.isin(np.arange(len(train)), copies)
        yield Finding(
            "warning",
            f"{share(repeated, len(train))} repeat an earlier one",
            f"the most frequent row occurs {len(copies)} times ({examples(train, where)}); remove unintended copies",
        )


def too_long_rows(values: dict[str, Any]) -> tuple[int, int] | None:
    """Return (rows that do not fit data.max_length, all rows) of a split if most do not fit; else None.

    Args:
        values: Statistics of the split. A row that is split loses nothing and is not counted.
    """
    counts = values.get("counts", {})
    cut = counts.get("cut", 0) + counts.get("dropped", 0)
    whole = max(values["rows"] + counts.get("dropped", 0), cut)
    return (cut, whole) if cut > MOSTLY_CUT * whole else None


def _find_long_rows(prepared: Prepared, values: dict[str, Any]) -> Iterator[Finding]:
    if (too_long := too_long_rows(values)) is None:
        return
    hint = "raise data.max_length, if memory allows"
    if (full := values.get("full_length")) is not None:
        some = "" if full["measured"] == full["rows"] else f" of {full['measured']} measured rows"
        hint += f": the longest{some or ' row'} has {full['tokens']} tokens"
    yield Finding("warning", f"{share(*too_long)} do not fit data.max_length {prepared.recipe.data.max_length}", hint)


def _find_answer_problems(prepared: Prepared, values: dict[str, Any]) -> Iterator[Finding]:
    """Find answers that contradict each other, are missing or dominate, if the task counts answers."""
    counts: dict[str, int] = values.get("answers", {})
    whole = sum(counts.values())
    is_classified = "macro_f1" in getattr(prepared.task, "metric_names", ())  # other tasks count kinds of answers
    if (number := values.get("contradictions", 0)) > CONTRADICTIONS * values["rows"]:
        yield Finding(
            "warning",
            f"{share(number, values['rows'])} have the same input as another row, and another answer",
            "decide which answer is right, and remove or correct the other row",
        )
    if missing := [name for name, number in counts.items() if number == 0]:
        some = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        hint = (
            "remove it from the labels, or add rows" if is_classified else "the loss learns from both kinds: add rows"
        )
        yield Finding("warning", f"no training row has the answer {some}", hint)
    if counts and max(counts.values()) > ONE_SIDED * whole:
        name = max(counts, key=lambda key: counts[key])
        yield Finding(
            "warning",
            f"{share(counts[name], whole)} have the answer {name}",
            "a model that always gives this answer has this accuracy: compare macro_f1 instead"
            if is_classified
            else "check the labels",
        )


def _find_untrained_rows(prepared: Prepared, train: Measures) -> Iterator[Finding]:
    nothing = train.trained == 0
    if count := int(nothing.sum()):
        yield Finding(
            "error" if count > UNTRAINED * len(train) else "warning",
            f"{share(count, len(train))} have no trained token ({examples(train, nothing)})",
            "are they truncated before their answer? Show them with --row, and raise data.max_length",
        )
    empty = (train.content == 0) & ~nothing
    if (prepared.recipe.data.truncation or properties_of(prepared.task).default_truncation) == "split":
        rows = np.stack([train.source, train.number])
        _, place, times = np.unique(rows, axis=1, return_inverse=True, return_counts=True)
        empty &= times[place.reshape(-1)] == 1  # the last piece of a row may have nothing but the end of the answer
    if count := int(empty.sum()):
        yield Finding(
            "warning",
            f"{share(count, len(train))} have an empty answer ({examples(train, empty)})",
            "the model learns to answer nothing: remove these rows unless intended",
        )


def _find_missing_ends(prepared: Prepared, train: Measures) -> Iterator[Finding]:
    """Find out whether answers end with an end token. Rows that may be truncated are not considered."""
    whole = (train.longest < prepared.recipe.data.max_length) & (train.trained > 0)
    if not whole.any() or (train.has_end & whole).any():
        return
    token = prepared.task.tokenizer.eos_token  # type: ignore[attr-defined]
    if (train.has_other_end & whole).any():
        yield Finding(
            "warning",
            f"answers end with a token that is not the tokenizer's end token {token}",
            "ftcli generate stops there, and final/ and exports have it in generation_config.json; programs that read "
            "only the tokenizer continue",
        )
        return
    if not properties_of(prepared.task).formats and not hasattr(prepared.task, "answer_ends"):
        yield Finding(  # a task of the user, which may train something other than answers
            "warning",
            f"no row ends with a trained end token {token}: the model would not learn to stop",
            "let `encode` add and train it, unless the model need not generate text",
        )
        return
    yield Finding(
        "error",
        f"no answer ends with the end token {token}: the model would not learn to stop",
        "let the chat template close the assistant's turn with it",
    )


def _find_template_problems(prepared: Prepared, train: Measures) -> Iterator[Finding]:
    if count := int(train.has_two_bos.sum()):
        yield Finding(
            "error",
            f"{share(count, len(train))} begin with two BOS tokens",
            "the chat template adds one and the tokenizer or the data another: remove one of them",
        )
    tokenizer = getattr(prepared.task, "tokenizer", None)
    texts = texts_of(None if tokenizer is None else tokenizer.chat_template)
    renders = "messages" in properties_of(prepared.task).formats
    if renders and (clock := date_finding(texts, prepared.recipe.data.chat_template_kwargs)):
        yield Finding("warning", *clock)
    if train.has_prompt.any() and tokenizer is not None and tokenizer.chat_template is None:
        yield Finding(
            "note",
            "the tokenizer has no chat template: prompts and answers are joined as plain text",
            "this is right for a base model; for a chat model, check model.name",
        )


def _find_unusual_text(train: Measures) -> Iterator[Finding]:
    """Find rows with unusually few characters per token: other scripts, encoded data, broken encodings."""
    enough = train.plain >= 16
    if not enough.any():
        return
    rate = train.characters / np.maximum(train.plain, 1)
    usual = float(np.median(rate[enough]))
    unusual = enough & (rate < RARE_CHARACTERS * usual)
    if count := int(unusual.sum()):
        yield Finding(
            "warning",
            f"{share(count, len(train))} have under a third of the usual {usual:.1f} characters in a token "
            f"({examples(train, unusual)})",
            "the tokenizer splits this text into very short tokens: another script, encoded data, or a broken encoding",
        )


def _find_spelled_tokens(statistics: dict[str, Any]) -> Iterator[Finding]:
    """Find texts that spell control tokens, such as the end of a turn."""
    for split, values in statistics.items():
        if (spelled := values.get("control_tokens")) is None:
            continue
        tokens = ", ".join(list(spelled["tokens"])[:5]) + (", ..." if len(spelled["tokens"]) > 5 else "")
        shown = "; ".join(f"row {number} of {source}: {text!r}" for number, source, text in spelled["shown"])
        yield Finding(
            "warning",
            f"data.{split}: the text of {share(spelled['found'], spelled['rows'])} spells control tokens ({tokens}); "
            + shown,
            "they become real tokens, as if the chat template had written them, and may end a turn or begin another: "
            "remove them, or write them in another way, unless that is intended",
        )


def _find_overlap(whole: int, exact: int, same_prompt: int) -> Iterator[Finding]:
    if exact > OVERLAP * whole:
        yield Finding(
            "error" if exact > MOSTLY_OVERLAP * whole else "warning",
            f"{share(exact, whole)} of the evaluation are training rows too",
            "the evaluation then measures memorisation: remove them from one of the two sets",
        )
    if same_prompt > OVERLAP * whole:
        yield Finding(
            "warning",
            f"{share(same_prompt, whole)} of the evaluation have the prompt of a training row, and another answer",
            "if both sets come from the same source, split them by prompt",
        )
