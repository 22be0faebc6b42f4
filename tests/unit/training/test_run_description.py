"""Lines of the log that tasks write about their training rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from ftcli.training.run_description import _describe_rows


class Task:
    """As if derived from a shipped task, whose `count_answers` reads the column `target`."""

    answer_columns = ("target",)

    def count_answers(self, rows: Dataset, facts: dict[str, Any]) -> dict[str, int]:
        return {label: rows["target"][:].count(number) for number, label in enumerate(facts["labels"])}

    def describe_rows(self, facts: dict[str, Any]) -> list[str]:
        return [str(facts)]


@pytest.mark.parametrize(("column", "good"), [("target", 2), ("soft_target", 7)])
def test_counts_replace_numbers_of_the_facts_if_the_rows_have_answers(column: str, good: int) -> None:
    facts = {"labels": ["labels", "good"], "good": 7}
    rows = SimpleNamespace(train=Dataset.from_dict({column: [0, 1, 1]}), facts=facts, streamed=False)
    run: Any = SimpleNamespace(task=Task(), rows=rows)
    assert _describe_rows(run) == [str(facts | {"good": good})]
