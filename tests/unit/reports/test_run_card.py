"""The model card of an upload: what the run folder knows, and no credentials."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftcli.config.load import load_run_recipe
from ftcli.reports.run_card import complete_card, training_seconds
from ftcli.runtime.run_folder import RunFolder

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "runs" / "folders" / "sft_lora"
HEAD = "---\nlibrary_name: peft\n---\n# LoRA adapter\n"


def test_complete_card_holds_data_curve_evaluation_compute_versions_and_recipe() -> None:
    card = complete_card(HEAD, load_run_recipe(FOLDER), RunFolder(FOLDER), None)
    titles = [line[3:] for line in card.splitlines() if line.startswith("## ")]
    assert titles == ["Data", "Training curve", "Evaluation", "Compute", "Versions", "Recipe"]
    assert "| training | chats.jsonl | train | - |" in card and "| 1 | 5.5518 | 0.0632 | 0.015 |" in card
    assert "| 2 | 5.5433 | 255.5322 |" in card and "- torch 2.13.0+cpu" in card and "global_size: 4" in card
    assert "- device: cpu, 1 process\n- CPU process hours: " in card and card.startswith("---\nlibrary_name: peft\n")


def test_complete_card_of_a_checkpoint_ends_at_its_step() -> None:
    card = complete_card(HEAD, load_run_recipe(FOLDER), RunFolder(FOLDER), FOLDER / "checkpoints" / "step-000001")
    assert "a checkpoint after step 1." in card and "| 1 | 5.5518" in card
    assert "| 2 | 5.55" not in card and "## Evaluation" not in card


def test_complete_card_contains_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_" + "aVerySecret1" * 3
    monkeypatch.setenv("HF_TOKEN", "another-secret-Value-9")
    recipe = load_run_recipe(FOLDER)
    sources = recipe.data.model_copy(update={"columns": {"prompt": token, "completion": "another-secret-Value-9"}})
    card = complete_card(HEAD + token, recipe.model_copy(update={"data": sources}), RunFolder(FOLDER), None)
    assert token not in card and "another-secret-Value-9" not in card and card.count("REDACTED") == 3


def test_complete_card_of_a_folder_without_metrics_leaves_sections_out(tmp_path: Path) -> None:
    card = complete_card(HEAD, load_run_recipe(FOLDER), RunFolder(tmp_path), None)
    assert "## Recipe" in card and "## Training curve" not in card and "## Compute" not in card


def test_training_seconds_adds_the_launches_of_a_resumed_run() -> None:
    rows = [{"seconds": 1.0}, {"seconds": 3.0}, {"eval/loss": 1.0}, {"seconds": 0.5}, {"seconds": 2.5}]
    assert training_seconds(rows) == 5.5 and training_seconds([]) == 0


def test_complete_card_counts_gpu_hours_of_all_processes(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text(json.dumps({"device": "cuda:0", "processes": 8}))
    row = {"step": 1, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-4, "seconds": 1800.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    card = complete_card(HEAD, load_run_recipe(FOLDER), RunFolder(tmp_path), None)
    assert "- device: cuda, 8 processes\n- GPU hours: 4 for the training steps" in card
