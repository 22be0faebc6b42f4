"""Reward models: what sources may hold, terms, and the score that plain transformers gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.config.recipe import Recipe
from ftcli.data.cache import prepare_rows
from ftcli.loop import train
from ftcli.models.scores import score_documents
from ftcli.runtime.errors import InputError
from ftcli.tasks.build import build_task
from ftcli.tasks.protocol import Term
from ftcli.tasks.shared import scored_answers
from ftcli.testing import save_tiny_encoder
from ftcli.training.setup import prepare

from ...support.cells import cell
from ...support.runner import MakeInputs


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    return make_inputs()


def of(folder: Path, file: str, **changes: Any) -> Recipe:
    rows = {"train": str(folder / f"{file}.jsonl"), "eval_rows": 5, "max_length": 128}
    return cell(folder, "reward", **{"data": rows} | changes)


def test_terms_follow_the_rows_and_the_options(inputs: Path) -> None:
    results = {}
    for file in ("pairs", "weighted", "ranked", "rated"):
        run = prepare(of(inputs, file, task_options={"center": 0.01} if file != "rated" else {}), cpu=True)
        results[file] = dict(run.terms.terms)
    assert results["pairs"] == results["ranked"] == {"bradley_terry": Term(1.0), "centring": Term(0.01)}
    assert results["weighted"] == {"bradley_terry": Term(1.0, "weights"), "centring": Term(0.01, "weights")}
    assert results["rated"] == {"regression": Term(1.0, "weights")}  # a mean over known scores


def test_sources_of_two_kinds_and_attributes_of_pairs_are_refused(inputs: Path) -> None:
    both = [{"path": str(inputs / f"{name}.jsonl")} for name in ("pairs", "rated")]
    given = of(inputs, "pairs", data={"train": both, "max_length": 128})
    with pytest.raises(InputError, match="has compared or ranked answers, but other sources have scored ones"):
        prepare_rows(given, build_task(given))
    given = of(inputs, "pairs", task_options={"attributes": ["right"]})
    with pytest.raises(InputError, match="task_options.attributes: .*which have no attributes"):
        prepare_rows(given, build_task(given))
    ranked = [{"path": str(inputs / f"{name}.jsonl")} for name in ("pairs", "ranked")]
    given = of(inputs, "pairs", data={"train": ranked, "max_length": 128})
    assert prepare_rows(given, build_task(given)).facts["attributes"] == []
    given = of(inputs, "rated", task_options={"center": 0.01})
    with pytest.raises(InputError, match="task_options.center is .* but the rows have scores"):
        prepare_rows(given, build_task(given))


def test_a_scored_row_among_ranked_ones_is_refused(make_inputs: MakeInputs) -> None:
    folder = make_inputs()
    mixed = (folder / "ranked.jsonl").read_text() + '{"prompt": "p", "completion": "c", "score": 1}\n'
    (folder / "mixed.jsonl").write_text(mixed)
    given = of(folder, "mixed")
    with pytest.raises(InputError, match="row 43 of .* has a score, but other rows have compared or ranked answers"):
        prepare_rows(given, build_task(given))


def test_attributes_are_the_outputs_of_the_model_in_their_order(inputs: Path) -> None:
    given = of(inputs, "rated")
    rows = prepare_rows(given, build_task(given))
    assert rows.facts["attributes"] == ["right", "short"]
    run = prepare(of(inputs, "rated", task_options={"attributes": ["short", "right"]}), cpu=True)
    model: Any = run.hardware.unwrap(run.model)
    assert model.config.id2label == {0: "short", 1: "right"} and model.config.problem_type == "regression"


@pytest.mark.parametrize("name", ["pairs", "rated"])
def test_the_exported_model_gives_the_same_scores_in_plain_transformers(
    name: str, inputs: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    data = {"train": str(inputs / f"{name}.jsonl"), "eval_rows": 5, "max_length": 128, "padding_free": True}
    run = prepare(of(inputs, name, data=data), cpu=True, output=tmp_path / "run")
    train(run)
    final = tmp_path / "run" / "final"
    plain = AutoModelForSequenceClassification.from_pretrained(final).eval()
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert tokenizer.pad_token_id == plain.config.pad_token_id
    task: Any = run.task
    rows = [run.rows.train[number] | {"epoch": 0, "training": True} for number in range(4)]
    batch = task.collate(rows)
    assert "position_ids" in batch, "the answers are concatenated"
    run.model.eval()
    with torch.no_grad():
        scores = task._scores(run.model, batch)
        answers = scored_answers.answers_of(rows)
        expected = torch.cat([plain(input_ids=torch.tensor([answer["input_ids"]])).logits for answer in answers])
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    # A score at the last token, which is the end of the turn, is another one where that token is the padding token.
    last = rows[0]["input_ids"][-1]
    other = scored_answers.collate_answers(rows, last, is_flat=True, attn_implementation=None)["last_positions"]
    assert not torch.equal(other, batch["last_positions"])


def test_documents_of_a_model_with_another_head_are_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    save_tiny_encoder(tmp_path / "encoder")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "encoder")
    with pytest.raises(InputError, match="has no head that scores concatenated documents"):
        score_documents(model)


@pytest.mark.parametrize("adapter", [{"type": "none"}, {"type": "lora", "r": 2}])
def test_an_encoder_can_be_a_reward_model_of_padded_rows(adapter: dict[str, Any], inputs: Path) -> None:
    """Its head has a bias, which cancels in the difference of two scores: the gradient may be exactly zero."""
    model = {"name": str(inputs / "encoder"), "dropout": 0.0}
    given = of(inputs, "pairs", model=model, adapter=adapter, batch={"global_size": 1}, train={"max_steps": 3})
    run = prepare(given, cpu=True)
    assert run.hardware.unwrap(run.model).config.num_labels == 1  # type: ignore[union-attr]
    assert "score" not in json.dumps(sorted(run.terms.terms))
    train(run)
