"""Draw the answers of runs to their prompts over time, as part of an HTML report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from ftcli.reports.run_record import RunRecord
from ftcli.runtime.errors import shortened
from ftcli.runtime.terminal import visible

MOST_PROMPTS, MOST_STEPS = 20, 20  # prompts on a page, and evaluations of one prompt
MOST_TEXT = 2000  # characters of a prompt or an answer


def draw_samples(runs: Sequence[RunRecord]) -> Iterator[str]:
    """Yield one table for each prompt: a row for each evaluation, a column for each run.

    Args:
        runs: The runs. Runs without answers have no column.
    """
    answering = [run for run in runs if run.samples]
    if not answering:
        return
    yield "<h2>Answers over time</h2>"
    prompts = list(dict.fromkeys(_prompt(row) for run in answering for row in run.samples))
    if len(prompts) > MOST_PROMPTS:
        yield f"<p>The first {MOST_PROMPTS} of {len(prompts)} prompts. samples.jsonl has all.</p>"
    answers = [_by_prompt(run) for run in answering]
    for prompt in prompts[:MOST_PROMPTS]:
        steps = sorted({step for by_step in answers for step in by_step.get(prompt, {})})
        head = "".join(f"<th>{_text(run.label)}</th>" for run in answering)
        rows = "".join(
            f"<tr><td>{step}</td>{''.join(_cell(by_step.get(prompt, {}).get(step)) for by_step in answers)}</tr>"
            for step in _chosen(steps)
        )
        reference = next((row["reference"] for run in answering for row in run.samples if _has(row, prompt)), None)
        expected = "" if reference is None else f"<p>Expected: {_text(str(reference))}</p>"
        table = f'<div class="scroll"><table><tr><th>step</th>{head}</tr>{rows}</table></div>'
        yield f"<h3>{_text(prompt)}</h3>{expected}{table}"


def _prompt(row: dict[str, Any]) -> str:
    """Return the prompt of a row as text; each message of a conversation has its role before it."""
    prompt = row.get("prompt", "")
    if isinstance(prompt, list) and all(isinstance(turn, dict) for turn in prompt):
        return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt)
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)


def _has(row: dict[str, Any], prompt: str) -> bool:
    return "reference" in row and _prompt(row) == prompt


def _by_prompt(run: RunRecord) -> dict[str, dict[int, dict[str, Any]]]:
    """Return prompt -> step -> row of a run."""
    by_prompt: dict[str, dict[int, dict[str, Any]]] = {}
    for row in run.samples:
        by_prompt.setdefault(_prompt(row), {})[row["step"]] = row
    return by_prompt


def _chosen(steps: list[int]) -> list[int]:
    """Return at most `MOST_STEPS` steps at equal distances, with the first and the last."""
    if len(steps) <= MOST_STEPS:
        return steps
    return [steps[index * (len(steps) - 1) // (MOST_STEPS - 1)] for index in range(MOST_STEPS)]


def _cell(row: dict[str, Any] | None) -> str:
    """Draw one answer."""
    if row is None:
        return "<td></td>"
    cut = "" if row.get("ended", True) else ' <span class="n">(cut at max_new_tokens)</span>'
    return f"<td><pre>{_text(str(row['answer']))}</pre>{cut}</td>"


def _text(text: str) -> str:
    """Escape text for HTML, shortened."""
    return escape(visible(shortened(text, MOST_TEXT)))
