"""Answers from the command line: during a run, after it, from its checkpoints, and in a conversation."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ftcli.checkpoint.folder import read_state
from ftcli.runtime.checkpoint_names import checkpoint_path

from ..support.recipes import recipe_values
from ..support.runner import MakeInputs, RunCli

PROMPTS = [f"{word} and more" for word in ("alpha", "beta", "gamma", "delta")]
RECIPE = recipe_values(
    model={"name": "untied", "dropout": 0.0},
    data={"train": "chats.jsonl", "max_length": 128},
    optimizer={"learning_rate": 5e-2},
    evaluate={"every_steps": 2, "generate": {"prompts": PROMPTS, "max_new_tokens": 8}},
    checkpoint={"every_steps": 2},
    log={"trackers": ["tensorboard"]},
)


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    return make_inputs({"r.yaml": RECIPE})


@pytest.fixture
def ftcli(inputs: Path, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli) -> RunCli:
    """Return `run_cli` in the folder of inputs."""
    monkeypatch.chdir(inputs)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return run_cli


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_generate_from_weights_and_checkpoints_gives_the_answers_of_the_run(ftcli: RunCli, inputs: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    code, _, err = ftcli("train", "r.yaml", "--output", "run")
    assert code == 0, err
    samples = rows((inputs / "run" / "samples.jsonl").read_text())
    assert [(row["step"], row["prompt"]) for row in samples] == [(step, text) for step in (2, 4) for text in PROMPTS]
    assert samples[0]["answer"] != samples[4]["answer"]
    assert f'step 4: "alpha and more" -> {json.dumps(samples[4]["answer"])}' in err
    assert "step 4: 1 more in run/samples.jsonl" in err
    evaluations = [row for row in rows((inputs / "run" / "metrics.jsonl").read_text()) if "loss" not in row]
    assert [set(row) for row in evaluations] == [{"step", "eval/answer_tokens", "eval/answers_ended"}] * 2
    assert evaluations[1]["eval/answer_tokens"] == sum(row["tokens"] for row in samples[4:]) / 4
    tags = []
    for events in (inputs / "run").rglob("events.out.tfevents.*"):
        events_reader = EventAccumulator(str(events))
        events_reader.Reload()
        tags += events_reader.Tags()["tensors"]
    assert "samples/0/text_summary" in tags

    (inputs / "prompts.txt").write_text("\n".join(PROMPTS))
    arguments = ("--file", "prompts.txt", "--max-new-tokens", 8, "--json")
    for target, step in (("run", 4), (checkpoint_path(Path("run"), 4), 4), (checkpoint_path(Path("run"), 2), 2)):
        code, out, err = ftcli("generate", target, *arguments, "--batch-size", 3)
        assert code == 0, err
        assert rows(out) == [{k: v for k, v in row.items() if k != "step"} for row in samples if row["step"] == step]
        assert f"ftcli: loading {target}" in err
    (inputs / "run" / "final").rename(inputs / "final")
    code, out, err = ftcli("generate", "run", *arguments)
    assert code == 0 and "has no final weights yet; using run/checkpoints/step-000004" in err
    assert [row["answer"] for row in rows(out)] == [row["answer"] for row in samples[4:]]
    (inputs / "final").rename(inputs / "run" / "final")

    code, _, err = ftcli("train", "r.yaml", "--output", "run", "--resume", "run/checkpoints/step-000002")
    assert code == 0, err
    assert rows((inputs / "run" / "samples.jsonl").read_text()) == samples  # what was given up is not there twice
    assert [row["step"] for row in rows((inputs / "run" / "samples.abandoned.jsonl").read_text())] == [4] * 4
    steps: dict[str, list[int]] = {"loss": [], "eval/answer_tokens": [], "samples/0/text_summary": []}
    for events in sorted((inputs / "run").rglob("events.out.tfevents.*")):
        events_reader = EventAccumulator(str(events))
        events_reader.Reload()
        for kind, read in (("scalars", events_reader.Scalars), ("tensors", events_reader.Tensors)):
            for tag in steps.keys() & set(events_reader.Tags()[kind]):
                steps[tag] += [event.step for event in read(tag)]
    assert steps == {"loss": [1, 2, 3, 4], "eval/answer_tokens": [2, 4], "samples/0/text_summary": [2, 4]}
    attempts = json.loads((inputs / "run" / "trackers.json").read_text())["attempts"]
    assert attempts == [{"after_step": 0}, {"after_step": 2}]


def test_train_stopped_before_sampling_samples_once_after_the_resume(ftcli: RunCli, inputs: Path) -> None:
    best = 'checkpoint.keep_best={"metric": "answer_tokens", "direction": "min"}'
    short = [w for key in ("evaluate.every_steps=1", "train.max_steps=3", best) for w in ("--set", key)]
    assert ftcli("train", "r.yaml", "--output", "whole", *short)[0] == 0
    launches, named = 0, []
    while not (inputs / "stopped" / "final").is_dir():
        code, _, err = ftcli(
            "train", "r.yaml", "--output", "stopped", "--resume", "auto", *short, "--set", "train.max_minutes=0.00001"
        )
        assert code in (0, 75), err
        launches += 1
        named += [code] * ("best checkpoint: step" in err)
    assert launches >= 3 and set(named) == {0, 75}  # when a run stops, and when it is done
    samples, metrics = (
        [rows((inputs / run / f"{name}.jsonl").read_text()) for run in ("stopped", "whole")]
        for name in ("samples", "metrics")
    )
    assert samples[0] == samples[1]
    for key in ("step", "loss", "eval/answer_tokens"):
        assert [row.get(key) for row in metrics[0]] == [row.get(key) for row in metrics[1]]
    state = read_state(checkpoint_path(inputs / "stopped", 2))
    assert set(state["metrics"]) == {"answer_tokens", "answers_ended"}


def test_generate_from_an_adapter_its_checkpoint_and_its_folder_gives_the_answers_of_the_run(ftcli: RunCli) -> None:
    lora = ("adapter.type=lora", "adapter.r=3", "model.new_tokens=[<a>,<b>]")
    code, _, err = ftcli("train", "r.yaml", "--output", "lora", *(word for key in lora for word in ("--set", key)))
    assert code == 0, err
    answers = [
        ftcli("generate", target, "--prompt", "alpha", "--max-new-tokens", 8)[1]
        for target in ("lora", checkpoint_path(Path("lora"), 4), Path("lora/final"))
    ]
    assert answers[0] == answers[1] == answers[2] != ""
    assert_unusable_adapters_are_refused(ftcli, Path("lora"))


# Changes of adapter_config.json -> what the error says.
UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "of prompts": ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4}, "is of a PROMPT_TUNING adapter"),
    "an unknown kind": ({"peft_type": "NOPE"}, "is of a NOPE adapter"),
    "imports a module": ({"megatron_core": "os", "megatron_config": {"a": 1}}, "is of an adapter for Megatron"),
    "another rank": ({"r": 5}, "the adapter does not fit its base model"),
    "a wrong type": ({"r": "two"}, "the adapter does not fit its base model"),
    "no base": ({"base_model_name_or_path": None}, "names no base model"),
}


def assert_unusable_adapters_are_refused(ftcli: RunCli, run: Path) -> None:
    """Check that a run and its folder of weights with a damaged adapter give no stack trace."""
    config = run / "final" / "adapter_config.json"
    good = json.loads(config.read_text())
    texts = {name: (json.dumps(good | changes), expected) for name, (changes, expected) in UNUSABLE.items()}
    for name, (text, expected) in (texts | {"a list": ("[1]", "it is not a JSON object")}).items():
        config.write_text(text)
        ended = ftcli("generate", run, "--prompt", "alpha", "--max-new-tokens", 1)
        assert (ended.code, expected in ended.err, "Traceback" in ended.err) == (2, True, False), (name, ended.err)
        ended = ftcli("generate", config.parent, "--prompt", "alpha", "--max-new-tokens", 1)
        assert (ended.code, "Traceback" in ended.err) == (2, False), (name, ended.err)
    config.write_text(json.dumps(good))


def test_generate_from_an_adapter_with_another_base_is_refused(ftcli: RunCli, inputs: Path) -> None:
    base = Path(shutil.copytree(inputs / "tied", inputs / "base"))
    code, _, err = ftcli(
        "train",
        "r.yaml",
        "--output",
        "beside",
        "--set",
        "adapter.type=lora",
        "--set",
        f"model.name={base}",
        "--set",
        "data.eval_rows=2",
    )
    assert code == 0, err
    chats = (inputs / "chats.jsonl").read_text()
    (inputs / "chats.jsonl").write_text(chats.replace("alpha", "beta"))
    code, _, err = ftcli("evaluate", "beside", "--cpu")
    (inputs / "chats.jsonl").write_text(chats)
    assert code == 0 and "warning: the evaluation rows are not those of the run" in err, err
    checkpoint, file = checkpoint_path(Path("beside"), 4), base / "model.safetensors"
    assert_another_tokenizer_is_noticed(ftcli, checkpoint, base)
    content = file.read_bytes()
    file.write_bytes(content[:-2] + bytes([content[-2] ^ 0x40, content[-1]]))
    code, out, err = ftcli("generate", checkpoint, "--prompt", "alpha", "--max-new-tokens", 2)
    assert code == 2 and out == "" and f"the frozen weights of {base} are not those" in err, err
    for source in (checkpoint, Path("beside")):
        code, _, err = ftcli("export", source, "exported", "--merge")
        assert code == 2 and f"the frozen weights of {base} are not those" in err and not Path("exported").exists(), err
    for command in (["generate", "beside", "--prompt", "alpha"], ["evaluate", "beside", "--cpu"]):
        code, out, err = ftcli(*command)
        assert code == 2 and out == "" and f"the frozen weights of {base} are not those" in err, err
    Path("beside/checkpoints").rename("checkpoints")  # the final weights are enough
    shutil.copytree("beside/final", "exported-adapter")
    for command in (
        *(["generate", target, "--prompt", "alpha"] for target in ("beside", "beside/final", "exported-adapter")),
        ["evaluate", "beside", "--cpu"],
    ):
        code, out, err = ftcli(*command)
        assert code == 2 and out == "" and f"the frozen weights of {base} are not those" in err, err
    again = ["--set", "adapter.type=lora", "--set", "adapter.path=beside/final", "--set", f"model.name={base}"]
    code, _, err = ftcli("train", "r.yaml", "--output", "again", *again, "--set", "data.eval_rows=2")
    assert code == 0 and f"warning: adapter.path: the frozen weights of {base} are not those" in err, err
    moved = base.rename(inputs / "moved")  # the adapter names the new place, and the recipe the old one
    (moved / "model.safetensors").write_bytes(content)
    config = Path("beside/final/adapter_config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(moved)}))
    code, _, err = ftcli("generate", "beside", "--prompt", "alpha", "--max-new-tokens", 2)
    assert code == 0, err
    code, _, err = ftcli("train", "r.yaml", "--output", "third", *again[:-1], f"model.name={moved}", "--dry-run")
    assert code == 0 and "are not those" not in err, err


def assert_another_tokenizer_is_noticed(ftcli: RunCli, checkpoint: Path, base: Path) -> None:
    """Check that a checkpoint is not opened with other ids of tokens, and that another chat template is told."""
    file, template = base / "tokenizer.json", base / "chat_template.jinja"
    before, text = file.read_text(), template.read_text()
    values = json.loads(before)
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(values))
    changed = f"the tokenizer of {base} is not the one of the run"
    for command in (["generate", checkpoint, "--prompt", "alpha"], ["export", checkpoint, "exported"]):
        code, _, err = ftcli(*command)
        assert code == 2 and changed in err and not Path("exported").exists(), err
    given = ["--set", "adapter.type=lora", "--set", "adapter.path=beside/final", "--set", f"model.name={base}"]
    code, _, err = ftcli("train", "r.yaml", "--output", "told", *given, "--dry-run")
    assert code == 0 and f"warning: adapter.path: {changed}" in err, err
    file.write_text(json.dumps(json.loads(before), indent=4))  # the same tokenizer
    template.write_text(text + "!")
    code, _, err = ftcli("generate", checkpoint, "--prompt", "alpha", "--max-new-tokens", 1)
    assert code == 0 and f"warning: the chat template of {base} is not the one of the run" in err, err
    template.write_text(text)
    code, _, err = ftcli("generate", checkpoint, "--prompt", "alpha", "--max-new-tokens", 1)
    assert code == 0 and "of the run" not in err, err


@pytest.mark.parametrize("task", [pytest.param("sft", marks=pytest.mark.slow), "pretrain"])
def test_generate_from_a_packed_run_and_its_export_gives_the_answers_of_the_run(
    task: str, ftcli: RunCli, inputs: Path
) -> None:
    run = f"packed-{task}"
    words = [f"task={task}", "data.packing=true", "data.max_length=64", "batch.global_size=2", "batch.micro_size=1"]
    words += ["data.train=texts.jsonl", "optimizer.learning_rate=0.01"] if task == "pretrain" else []
    code, _, err = ftcli("train", "r.yaml", "--output", run, *(w for word in words for w in ("--set", word)))
    assert code == 0, err
    samples = rows((inputs / run / "samples.jsonl").read_text())
    expected = [row["answer"] for row in samples if row["step"] == 4]
    assert len(expected) == 4 and any(expected)
    arguments = [word for text in PROMPTS for word in ("--prompt", text)]
    for target in (run, checkpoint_path(Path(run), 4)):
        code, out, err = ftcli("generate", target, *arguments, "--max-new-tokens", 8, "--json")
        assert code == 0, err
        assert [row["answer"] for row in rows(out)] == expected
    code, _, err = ftcli("export", run, f"{run}-plain")  # which loads it in a fresh process
    assert code == 0, err
    for folder in (inputs / run / "final", inputs / f"{run}-plain"):
        assert "documents" not in (folder / "config.json").read_text()


def test_chat_from_a_pipe_prints_only_answers(ftcli: RunCli, inputs: Path) -> None:
    typed = "alpha\n/undo\nbeta\n\n/system be brief\n/save talk.jsonl\n/sav\n/save talk.txt\n/reset\n/quit\nnever\n"
    code, out, err = ftcli("chat", "untied", "--max-new-tokens", 5, stdin=typed)
    assert code == 0, err
    assert len(out.splitlines()) == 2
    assert err.count("stopped at 5 tokens (--max-new-tokens)") == 2
    for message in (
        "0 questions are left",
        "system turn set",
        "did you mean '/save'",
        "the file name must end in .jsonl",
        "appended to talk.jsonl: 2 turns; an answer was stopped, and a model would learn to end there: edit it",
    ):
        assert message in err
    (saved,) = rows((inputs / "talk.jsonl").read_text())
    first, question, answer = saved["messages"]
    assert (first, question) == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "beta"},
    )
    assert answer == {"role": "assistant", "content": out.splitlines()[1].strip()}


def test_chat_with_a_model_without_template_is_refused_and_generate_works(ftcli: RunCli, inputs: Path) -> None:
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
    ("changes", "expected"),
    [
        (("task=text_classification",), "evaluate.generate: task text_classification does not generate text"),
        (("evaluate.generate.file=no.txt", "evaluate.generate.prompts=[]"), "evaluate.generate.file: no file at"),
        (("evaluate.generate.file=no.txt",), "evaluate.generate: exactly one of prompts and file must be given"),
        (("evaluate.generate.max_new_tokens=5000",), "exceeds the 2048 positions of the model"),
    ],
)
def test_train_with_unusable_generate_settings_is_refused(
    changes: tuple[str, ...], expected: str, ftcli: RunCli
) -> None:
    code, _, err = ftcli("train", "r.yaml", "--output", "no", *(w for change in changes for w in ("--set", change)))
    assert code == 2 and expected in err, err
    assert "Traceback" not in err


def test_generate_without_prompts_is_refused(ftcli: RunCli) -> None:
    code, _, err = ftcli("generate", "untied")
    assert code == 2 and "give --prompt TEXT, or --file FILE" in err


def test_generate_from_a_folder_without_weights_of_a_causal_model_is_refused(ftcli: RunCli, inputs: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        XLNetConfig,
        XLNetLMHeadModel,
    )

    damaged = Path(shutil.copytree("untied", "damaged")) / "model.safetensors"
    weights = load_file(damaged)
    removed = sorted(weights)[-1]
    save_file({name: value for name, value in weights.items() if name != removed}, damaged, {"format": "pt"})
    classifier = AutoModelForSequenceClassification.from_pretrained("untied")
    get_peft_model(classifier, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])).save_pretrained("scores")
    AutoModelForSequenceClassification.from_pretrained("tied").save_pretrained("rewards")
    base = AutoModelForCausalLM.from_pretrained("damaged")
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained("apart/lacking")
    shutil.copytree("untied", "xlnet")
    XLNetLMHeadModel(XLNetConfig(vocab_size=300, d_model=16, n_layer=1, n_head=2, d_inner=16)).save_pretrained("xlnet")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path("untied") / file, "scores")
        shutil.copy(Path("untied") / file, "apart/lacking")
        shutil.copy(Path("tied") / file, "rewards")
    for name, message in {
        "damaged": f"the weights of damaged do not fit a LlamaForCausalLM: 1 are missing, the first is {removed}",
        "apart/lacking": "the base model damaged of the adapter in apart/lacking lacks weights of a LlamaForCausalLM: "
        f"1 are missing, the first is {removed}",
        "encoder": "the weights of encoder do not fit a BertLMHeadModel",
        "scores": "the adapter in scores does not generate text: its task type is SEQ_CLS",
        "rewards": "rewards is a LlamaForSequenceClassification, which answers no prompts",
        "xlnet": "xlnet is an encoder (xlnet), in which tokens attend to later tokens",
    }.items():
        code, out, err = ftcli("generate", name, "--prompt", "alpha", "--cpu")
        assert (code, out) == (2, ""), (name, err)
        assert f"error: {message}" in err


def test_run_that_cannot_be_read_or_written_is_refused(
    ftcli: RunCli, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = ftcli("train", "r.yaml", "--output", "damaged", "--set", "data.eval=chats.jsonl")
    assert code == 0, err
    writable = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and writable(path, mode))
    code, _, err = ftcli("evaluate", "damaged")  # before the evaluation, whose metrics would be lost
    assert code == 2 and "damaged cannot be written to" in err and "evaluation.json is written into it" in err
    monkeypatch.undo()
    os.truncate(inputs / "damaged" / "final" / "model.safetensors", 1000)
    code, _, err = ftcli("generate", inputs / "damaged", "--prompt", "alpha")
    assert code == 2 and "model.safetensors is damaged: it has no valid header" in err
