"""Answers from the command line: during a run, after it, from its checkpoints, and in a conversation."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftcli.__main__ import main
from ftcli.checkpoint_folder import checkpoint_path, read_state

from ..multiprocess.cells import write_inputs

ASKED = [f"{word} and more" for word in ("alpha", "beta", "gamma", "delta")]
RECIPE: dict[str, Any] = {
    "task": "sft",
    "model": {"name": "untied", "dropout": 0.0},
    "data": {"train": "chats.jsonl", "max_length": 128},
    "batch": {"global_size": 6, "micro_size": 3},
    "train": {"max_steps": 4},
    "optimizer": {"learning_rate": 5e-2},
    "evaluate": {"every_steps": 2, "generate": {"prompts": ASKED, "max_new_tokens": 8}},
    "checkpoint": {"every_steps": 2},
    "log": {"trackers": ["tensorboard"]},
}
Ftcli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    (folder / "r.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


@pytest.fixture
def ftcli(inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ftcli:
    monkeypatch.chdir(inputs)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def call(*arguments: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_leaves_its_answers_and_the_same_come_from_its_weights_and_checkpoints(
    ftcli: Ftcli, inputs: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    code, _, err = ftcli("train", "r.yaml", "--output", "run")
    assert code == 0, err
    samples = rows((inputs / "run" / "samples.jsonl").read_text())
    assert [(row["step"], row["prompt"]) for row in samples] == [(step, text) for step in (2, 4) for text in ASKED]
    assert samples[0]["answer"] != samples[4]["answer"]
    assert f'step 4: "alpha and more" -> {json.dumps(samples[4]["answer"])}' in err
    assert "step 4: 1 more in run/samples.jsonl" in err
    evaluations = [row for row in rows((inputs / "run" / "metrics.jsonl").read_text()) if "loss" not in row]
    assert [set(row) for row in evaluations] == [{"step", "eval/answer_tokens", "eval/answers_ended"}] * 2
    assert evaluations[1]["eval/answer_tokens"] == sum(row["tokens"] for row in samples[4:]) / 4
    tags = []
    for events in (inputs / "run").rglob("events.out.tfevents.*"):
        found = EventAccumulator(str(events))
        found.Reload()
        tags += found.Tags()["tensors"]
    assert "samples/0/text_summary" in tags

    (inputs / "asked.txt").write_text("\n".join(ASKED))
    asked = ("--file", "asked.txt", "--max-new-tokens", 8, "--json")
    for target, step in (("run", 4), (checkpoint_path(Path("run"), 4), 4), (checkpoint_path(Path("run"), 2), 2)):
        code, out, err = ftcli("generate", target, *asked, "--batch-size", 3)
        assert code == 0, err
        assert rows(out) == [{k: v for k, v in row.items() if k != "step"} for row in samples if row["step"] == step]
        assert f"ftcli: loading {target}" in err
    (inputs / "run" / "final").rename(inputs / "final")
    code, out, err = ftcli("generate", "run", *asked)
    assert code == 0 and "has no final weights yet; run/checkpoints/step-000004 answers" in err
    assert [row["answer"] for row in rows(out)] == [row["answer"] for row in samples[4:]]
    (inputs / "final").rename(inputs / "run" / "final")

    code, _, err = ftcli("train", "r.yaml", "--output", "run", "--resume", "run/checkpoints/step-000002")
    assert code == 0, err
    assert rows((inputs / "run" / "samples.jsonl").read_text()) == samples  # what was given up is not there twice
    assert [row["step"] for row in rows((inputs / "run" / "samples.abandoned.jsonl").read_text())] == [4] * 4


def test_a_run_that_is_stopped_before_it_could_ask_asks_once_when_it_goes_on(ftcli: Ftcli, inputs: Path) -> None:
    best = 'checkpoint.keep_best={"metric": "answer_tokens", "direction": "min"}'
    short = [w for key in ("evaluate.every_steps=1", "train.max_steps=3", best) for w in ("--set", key)]
    assert ftcli("train", "r.yaml", "--output", "whole", *short)[0] == 0
    launches = 0
    while not (inputs / "stopped" / "final").is_dir():
        code, _, err = ftcli(
            "train", "r.yaml", "--output", "stopped", "--resume", "auto", *short, "--set", "train.max_minutes=0.00001"
        )
        assert code in (0, 75), err
        launches += 1
    assert launches >= 3
    samples, metrics = (
        [rows((inputs / run / f"{name}.jsonl").read_text()) for run in ("stopped", "whole")]
        for name in ("samples", "metrics")
    )
    assert samples[0] == samples[1]
    for key in ("step", "loss", "eval/answer_tokens"):
        assert [row.get(key) for row in metrics[0]] == [row.get(key) for row in metrics[1]]
    state = read_state(checkpoint_path(inputs / "stopped", 2))
    assert set(state["metrics"]) == {"answer_tokens", "answers_ended"}


def test_a_checkpoint_of_an_adapter_answers_as_its_run(ftcli: Ftcli) -> None:
    lora = [f"adapter.{key}" for key in ("type=lora", "r=3")]
    code, _, err = ftcli("train", "r.yaml", "--output", "lora", *(word for key in lora for word in ("--set", key)))
    assert code == 0, err
    answers = [
        ftcli("generate", target, "--prompt", "alpha", "--max-new-tokens", 8)[1]
        for target in ("lora", checkpoint_path(Path("lora"), 4))
    ]
    assert answers[0] == answers[1] != ""


@pytest.mark.parametrize("task", [pytest.param("sft", marks=pytest.mark.slow), "pretrain"])
def test_a_packed_run_answers_as_its_weights_and_checkpoints_and_is_exported_as_any_model(
    task: str, ftcli: Ftcli, inputs: Path
) -> None:
    run = f"packed-{task}"
    words = [f"task={task}", "data.packing=true", "data.max_length=64", "batch.global_size=2", "batch.micro_size=1"]
    words += ["data.train=texts.jsonl", "optimizer.learning_rate=0.01"] if task == "pretrain" else []
    code, _, err = ftcli("train", "r.yaml", "--output", run, *(w for word in words for w in ("--set", word)))
    assert code == 0, err
    samples = rows((inputs / run / "samples.jsonl").read_text())
    wanted = [row["answer"] for row in samples if row["step"] == 4]
    assert len(wanted) == 4 and any(wanted)
    asked = [word for text in ASKED for word in ("--prompt", text)]
    for target in (run, checkpoint_path(Path(run), 4)):
        code, out, err = ftcli("generate", target, *asked, "--max-new-tokens", 8, "--json")
        assert code == 0, err
        assert [row["answer"] for row in rows(out)] == wanted
    code, _, err = ftcli("export", run, f"{run}-plain")  # which loads it in a fresh process
    assert code == 0, err
    for folder in (inputs / run / "final", inputs / f"{run}-plain"):
        assert "documents" not in (folder / "config.json").read_text()


def test_a_conversation_is_read_from_a_pipe_and_only_answers_are_printed(ftcli: Ftcli, inputs: Path) -> None:
    said = "alpha\n/undo\nbeta\n\n/system be brief\n/save talk.jsonl\n/sav\n/save talk.txt\n/reset\n/quit\nnever\n"
    code, out, err = ftcli("chat", "untied", "--max-new-tokens", 5, stdin=said)
    assert code == 0, err
    assert len(out.splitlines()) == 2
    assert err.count("cut at 5 tokens (--max-new-tokens)") == 2
    for told in ("0 questions are left", "system turn set", "did you mean '/save'", "give a file that ends in .jsonl"):
        assert told in err
    (saved,) = rows((inputs / "talk.jsonl").read_text())
    first, question, answer = saved["messages"]
    assert (first, question) == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "beta"},
    )
    assert answer == {"role": "assistant", "content": out.splitlines()[1].strip()}


def test_a_model_without_a_template_generates_and_does_not_chat(ftcli: Ftcli, inputs: Path) -> None:
    from ftcli.testing import save_tiny_causal, tiny_tokenizer

    folder = save_tiny_causal(inputs / "plain", tied=False)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    code, _, err = ftcli("chat", "plain", stdin="hello\n")
    assert code == 2 and "ftcli generate plain --prompt TEXT" in err
    code, _, err = ftcli("generate", "plain", "--prompt", "alpha", "--max-new-tokens", 3)
    assert code == 0, err
    code, _, err = ftcli("generate", "plain", "--prompt", "alpha", "--system", "x")
    assert code == 2 and "no chat template" in err


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (("task=text_classification",), "evaluate.generate: task text_classification does not generate text"),
        (("evaluate.generate.file=no.txt", "evaluate.generate.prompts=[]"), "evaluate.generate.file: no file at"),
        (("evaluate.generate.file=no.txt",), "evaluate.generate: exactly one of prompts and file must be given"),
        (("evaluate.generate.max_new_tokens=5000",), "beyond the 2048 positions of the model"),
    ],
)
def test_a_recipe_that_cannot_be_answered_is_refused(changes: tuple[str, ...], wanted: str, ftcli: Ftcli) -> None:
    code, _, err = ftcli("train", "r.yaml", "--output", "no", *(w for change in changes for w in ("--set", change)))
    assert code == 2 and wanted in err, err
    assert "Traceback" not in err


def test_nothing_to_answer_is_an_error(ftcli: Ftcli) -> None:
    code, _, err = ftcli("generate", "untied")
    assert code == 2 and "give --prompt TEXT, or --file FILE" in err
