"""Adapters from training to loading in peft: trained weights, resuming, gradient checks and exports. Tiny models."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftcli.checkpoint.export import export
from ftcli.checkpoint.final import PROBE, load_plain
from ftcli.config.load import dump_recipe
from ftcli.config.recipe import Recipe
from ftcli.config.recipe_model import Adapter
from ftcli.launch.preflight import check_inputs
from ftcli.loop import steps, train
from ftcli.models.adapters import adapter_problems, disable_adapter
from ftcli.runtime.checkpoint_names import checkpoint_path
from ftcli.runtime.errors import InputError, RunError
from ftcli.tiny_models import SIZES, _save, build_tiny, tiny_tokenizer
from ftcli.training.checkpointing import save_checkpoint
from ftcli.training.final_weights import save_final
from ftcli.training.gradient_watch import NEW_ROWS, _is_rare, first_moments
from ftcli.training.run import Run
from ftcli.training.setup import prepare

from ..support.cells import cell

LORA = {"type": "lora", "r": 3, "lora_alpha": 6}
NEW = ["<think>", "</think>"]
MLP = ["gate_proj", "up_proj", "down_proj"]
TASK = """
from ftcli.tasks.sft import Options
from ftcli.tasks.sft import Task as Sft


class Task(Sft):
    {sparse}

    def finish_model(self, model):
        import torch

        model.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        {change}
        super().finish_model(model)
"""


def recipe(folder: Path, model: str = "untied", *, new_tokens: tuple[str, ...] = (), **changes: Any) -> Recipe:
    section = {"name": str(folder / model), "dropout": 0.0, "new_tokens": list(new_tokens)}
    data = {"train": {"path": str(folder / "thoughts.jsonl")}, "max_length": 128}
    batch = {"global_size": 6, "micro_size": 6}
    return cell(folder, "sft-tied", **({"model": section, "data": data, "batch": batch} | changes))


def trained(what: Recipe, output: Path) -> Run:
    """Train to the end and write the run folder."""
    run = prepare(what, cpu=True, output=output)
    for _ in steps(run):
        pass
    save_final(run)
    (output / "recipe.yaml").write_text(dump_recipe(what))
    return run


def test_parameter_groups_have_their_learning_rate_factor_at_every_step(inputs: Path) -> None:
    adapter = LORA | {"loraplus_lr_ratio": 4.0, "target_modules": ["embed_tokens", "q_proj"]}
    run = prepare(recipe(inputs, adapter=adapter), cpu=True)
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    for step in steps(run):
        counts = {"lora_A": 0, "lora_B": 0, "lora_embedding_A": 0, "lora_embedding_B": 0}
        for group in run.optimizer.param_groups:
            for kind in {
                match[0] for p in group["params"] if (match := re.search(r"lora_(embedding_)?[AB]", names[id(p)]))
            }:
                counts[kind] += 1
                assert group["lr"] == pytest.approx(step.learning_rate * (4 if kind.endswith("_B") else 1))
        assert all(counts.values())


def test_lora_scale_is_alpha_over_r_or_over_its_root(inputs: Path) -> None:
    for rooted, scale in ((False, 2.0), (True, 6 / 3**0.5)):
        model: Any = prepare(recipe(inputs, adapter=LORA | {"use_rslora": rooted}), cpu=True).model
        scales = {module.scaling["default"] for module in model.modules() if hasattr(module, "lora_A")}
        assert list(scales) == [pytest.approx(scale)]


KINDS: dict[str, dict[str, Any]] = {
    "new tokens and DoRA, tied": {"model": "tied", "new_tokens": NEW, "adapter": LORA | {"use_dora": True}},
    "new tokens, all trained": {"model": "tied", "new_tokens": NEW},
    "whole modules": {"adapter": LORA | {"modules_to_save": ["lm_head"], "use_rslora": True}},
    "new tokens": {"new_tokens": NEW, "adapter": LORA},
    "new tokens, saved whole": {"new_tokens": NEW, "adapter": LORA | {"modules_to_save": ["embed_tokens", "lm_head"]}},
}
FAST = "new tokens and DoRA, tied"


@pytest.mark.parametrize("kind", [k if k == FAST else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_save_final_of_an_adapter_gives_the_same_logits_in_peft(kind: str, inputs: Path, tmp_path: Path) -> None:
    run = trained(recipe(inputs, **KINDS[kind]), tmp_path / "run")
    probe = load_file(tmp_path / "run" / PROBE)
    expected = probe.pop("logits")
    exported = export(tmp_path / "run", tmp_path / "merged", merge="adapter" in KINDS[kind])
    assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == [1]
    assert "Answers end with `<|im_end|>`" in (exported / "README.md").read_text()
    for folder in (tmp_path / "run" / "final", exported):
        with torch.no_grad():
            loaded_logits = load_plain("AutoModelForCausalLM", folder)(**probe).logits
        real = probe["attention_mask"].bool()
        torch.testing.assert_close(loaded_logits[real], expected[real], rtol=1e-4, atol=1e-4)
    if "adapter" in KINDS[kind]:
        stored = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
        assert len(stored) == len(run.hardware.trained_shapes(run.model))


@pytest.mark.parametrize(
    ("model", "adapter", "merge"),
    [
        ("tied", {"modules_to_save": ["embed_tokens"]}, True),
        pytest.param("tied", {"modules_to_save": ["embed_tokens"]}, False, marks=pytest.mark.slow),
        pytest.param("experts", {"target_modules": MLP}, True, marks=pytest.mark.slow),
        pytest.param("experts", {"target_modules": MLP}, False, marks=pytest.mark.slow),
    ],
)
def test_export_of_a_checkpoint_has_the_logits_of_the_trained_model(
    model: str,
    adapter: dict[str, Any],
    merge: bool,
    inputs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if model == "experts":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
        settings = SIZES | experts | {"vocab_size": 259, "num_key_value_heads": 2, "eos_token_id": 1, "pad_token_id": 1}
        _save(build_tiny("Qwen3MoeForCausalLM", **settings), tiny_tokenizer(), tmp_path / "experts")
    what = recipe(tmp_path if model == "experts" else inputs, model, adapter=LORA | adapter)
    what = what.model_copy(update={"data": recipe(inputs).data})
    run = prepare(what, cpu=True, output=tmp_path / "run")
    for _ in steps(run):
        pass
    saved = save_checkpoint(run, run.position)
    assert saved is not None
    exported = export(saved, tmp_path / "exported", merge=merge)
    assert "all weights are equal to the trained ones, and its logits are within" in capsys.readouterr().err
    inputs_ = run.task.probe(run.task.collate([run.rows.train[i] | {"epoch": 0, "training": False} for i in range(2)]))
    trained_model: Any = run.model.eval()
    plain = load_plain("AutoModelForCausalLM", exported)
    with torch.no_grad():
        expected, actual = trained_model(**inputs_).logits, plain(**inputs_).logits
        with disable_adapter(trained_model):
            base = trained_model(**inputs_).logits
    assert (actual - expected).norm() / expected.norm() < 1e-5 < 1e-3 < (base - expected).norm() / expected.norm()
    line = "the embeddings are trained with the adapter, so they become two weights"
    assert any(line in each for each in run.log_lines) == (model == "tied")
    assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == [1]
    config = json.loads((exported / ("config.json" if merge else "adapter_config.json")).read_text())
    assert not merge or config.get("tie_word_embeddings", False) is False


def test_train_with_adapter_path_starts_from_the_adapter_of_another_run(inputs: Path, tmp_path: Path) -> None:
    first = trained(recipe(inputs, **KINDS[FAST]), tmp_path / "run")
    again = KINDS[FAST]["adapter"] | {"path": str(tmp_path / "run" / "final")}
    second = prepare(recipe(inputs, **(KINDS[FAST] | {"adapter": again})), cpu=True)
    ends = {name: p for name, p in first.model.named_parameters() if p.requires_grad}
    starts = {name: p for name, p in second.model.named_parameters() if p.requires_grad}
    assert list(ends) == list(starts)
    assert all(torch.equal(ends[name], starts[name]) for name in ends)


def test_second_stage_with_the_new_tokens_in_another_order_is_refused(inputs: Path, tmp_path: Path) -> None:
    trained(recipe(inputs, new_tokens=NEW, adapter=LORA), tmp_path / "run")
    again = LORA | {"path": str(tmp_path / "run" / "final")}
    prepare(recipe(inputs, new_tokens=NEW, adapter=again), cpu=True)
    for refuse in (partial(prepare, cpu=True), partial(check_inputs, cpu=True)):
        with pytest.raises(InputError, match="model.new_tokens: .*tokenizer.json has other tokens than the recipe"):
            refuse(recipe(inputs, new_tokens=NEW[::-1], adapter=again))


def test_second_stage_with_trained_rows_of_other_tokens_is_refused(inputs: Path, tmp_path: Path) -> None:
    trained(recipe(inputs, new_tokens=NEW, adapter=LORA), tmp_path / "run")
    file = tmp_path / "run" / "final" / "adapter_config.json"
    values = json.loads(file.read_text())
    again = recipe(inputs, new_tokens=NEW, adapter=LORA | {"path": str(file.parent)})
    for change in (lambda rows: rows[::-1], lambda rows: [5, 7]):  # plain peft has any order, and trains known tokens
        rows = {name: change(rows) for name, rows in values["trainable_token_indices"].items()}
        file.write_text(json.dumps(values | {"trainable_token_indices": rows}))
        with pytest.raises(InputError, match="has the rows .* embeddings, but those of the recipe's new tokens are"):
            prepare(again, cpu=True)


@pytest.mark.parametrize(("name", "others"), [("norm", True), ("model.norm", False)])
def test_modules_to_save_are_found_by_the_ends_of_their_names_and_the_log_says_so(
    name: str, others: bool, inputs: Path
) -> None:
    run = prepare(recipe(inputs, adapter=LORA | {"modules_to_save": [name]}), cpu=True)
    parts = [found.partition(".modules_to_save") for found, _ in run.model.named_parameters()]
    saved = {found.removeprefix("base_model.model.") for found, is_saved, _ in parts if is_saved}
    assert "model.norm" in saved and ("model.layers.0.input_layernorm" in saved) == others
    line = (
        "adapter.modules_to_save: norm means every module whose name ends so, also model.layers.0.input_layernorm "
        "(4 others); model.norm would mean that one only"
    )
    assert (line in run.log_lines) == others


def save_adapter(folder: Path, inputs: Path) -> Path:
    """Write an adapter as peft alone does."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(inputs / "untied")
    get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"])).save_pretrained(folder)
    return folder


def test_prepare_with_adapter_path_of_other_settings_is_refused(inputs: Path, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "adapter", inputs)
    mine = {"type": "lora", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "path": str(folder)}
    stored = load_file(folder / "adapter_model.safetensors")
    run = prepare(recipe(inputs, adapter=mine), cpu=True)
    values = {name.replace(".default", ""): p for name, p in run.model.named_parameters() if p.requires_grad}
    assert all(torch.equal(values[name], value) for name, value in stored.items()) and len(values) == len(stored)

    other = Adapter.model_validate(mine | {"r": 4, "use_dora": True})
    assert [problem.what.split(",")[0] for problem in adapter_problems(other)] == [
        "adapter.r is 4",
        "adapter.use_dora is True",
    ]
    with pytest.raises(InputError, match=r"has another adapter: .*k_proj.lora_A.weight is missing"):
        prepare(recipe(inputs, adapter=mine | {"target_modules": ["q_proj", "k_proj"]}), cpu=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"rank_pattern": {"q_proj": 2}}))
    assert "rank_pattern" in adapter_problems(Adapter.model_validate(mine))[0].what
    (folder / "adapter_config.json").write_text(json.dumps(config | {"alora_invocation_tokens": [0, 50]}))
    assert "alora_invocation_tokens" in adapter_problems(Adapter.model_validate(mine))[0].what
    (folder / "adapter_model.safetensors").unlink()
    assert "no adapter_model.safetensors" in adapter_problems(Adapter.model_validate(mine))[0].what
    shutil.rmtree(folder)
    assert "no adapter_config.json" in adapter_problems(Adapter.model_validate(mine))[0].what


@pytest.mark.parametrize("key", ["modules_to_save", "exclude_modules"])
def test_prepare_with_target_modules_without_a_match_names_them(key: str, inputs: Path) -> None:
    with pytest.raises(InputError, match=f"adapter.{key}: no module's name ends with head"):
        prepare(recipe(inputs, adapter=LORA | {key: ["head"]}), cpu=True)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("untied", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("untied", {"target_modules": ["q_proj", "lm_head"]}),
        ("tied", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("tied", {"target_modules": ["q_proj", "lm_head"]}),
        ("tied", {"target_modules": r".*(q_proj|lm_head)"}),
        ("tied", {"modules_to_save": ["lm_head"]}),
        ("tied", {"modules_to_save": ["embed_tokens"]}),
    ],
)
def test_prepare_with_an_adapter_on_the_rows_of_new_tokens_is_refused(
    model: str, names: dict[str, list[str]], inputs: Path
) -> None:
    with pytest.raises(InputError, match=r"model.new_tokens trains the new rows of both\n.*adapter.modules_to_save"):
        prepare(recipe(inputs, model, adapter=LORA | names, new_tokens=NEW), cpu=True)


def watched(inputs: Path, folder: Path, change: str, sparse: str = "", steps_: int = 3) -> list[float]:
    own = folder / f"task{len(list(folder.iterdir()))}.py"  # a file is imported once
    own.write_text(TASK.format(change=change, sparse=sparse))
    what = recipe(inputs, task=str(own), train={"max_steps": steps_})
    return [step.loss for step in steps(prepare(what, cpu=True))]


def test_check_gradients_of_an_unused_tensor_stops_the_run_and_names_it(inputs: Path, tmp_path: Path) -> None:
    unused = "model.extra = torch.nn.Linear(2, 2)"
    with pytest.raises(RunError, match=r"2 of 25 trained tensors had no gradient in 3 steps: extra.weight, extra.bias"):
        watched(inputs, tmp_path, unused)
    with pytest.raises(RunError, match=r"in 20 steps: extra.weight, extra.bias"):
        watched(inputs, tmp_path, unused, steps_=22)
    assert len(watched(inputs, tmp_path, unused, sparse="sparse = ('extra',)")) == 3
    assert len(watched(inputs, tmp_path, "")) == 3  # experts are left out


def test_check_gradients_with_policy_warn_names_tensors_and_continues(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "task.py"
    own.write_text(TASK.format(change="model.extra = torch.nn.Linear(2, 2)", sparse=""))
    what = recipe(inputs, task=str(own), train={"max_steps": 3}, faults={"missing_gradient": "warn"})
    assert len(list(steps(prepare(what, cpu=True)))) == 3
    assert "2 of 25 trained tensors had no gradient in 3 steps: extra.weight, extra.bias" in capsys.readouterr().err


def test_run_with_tensors_without_gradient_resumes_and_saves_again(inputs: Path, tmp_path: Path) -> None:
    own = tmp_path / "task.py"
    own.write_text(TASK.format(change="model.extra = torch.nn.Linear(2, 2)", sparse="sparse = ('extra',)"))
    what = recipe(inputs, task=str(own), train={"max_steps": 4}, checkpoint={"every_steps": 2, "keep": 3})
    whole = prepare(what, cpu=True, output=tmp_path / "whole")
    train(whole)
    assert whole.folder is not None
    again = prepare(what, cpu=True, output=tmp_path / "again", resume=checkpoint_path(whole.folder.path, 2))
    train(again)
    assert again.hardware.updates(again.model, again.optimizer) == 4
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_check_gradients_sees_through_the_weight_decay_in_the_momentum_of_sgd(inputs: Path, tmp_path: Path) -> None:
    own = tmp_path / "task.py"
    own.write_text(TASK.format(change="model.extra = torch.nn.Linear(2, 2)", sparse=""))
    sgd = {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1, "learning_rate": 1e-3}
    what = recipe(inputs, task=str(own), train={"max_steps": 3}, optimizer=sgd)
    with pytest.raises(RunError, match=r"2 of 25 trained tensors had no gradient in 3 steps: extra.weight, extra.bias"):
        list(steps(prepare(what, cpu=True)))


def test_check_gradients_allows_new_tokens_that_no_row_uses(inputs: Path) -> None:
    run = prepare(recipe(inputs, adapter=LORA, new_tokens=("<rare>",), train={"max_steps": 3}), cpu=True)
    assert len(list(steps(run))) == 3
    moved = {name: bool(moment) for (name, _), moment in first_moments(run).items() if NEW_ROWS in name}
    assert sorted(moved.values()) == [False, True]  # the head's row always has a gradient
    assert [_is_rare(run.model, name) for name in moved] == [not value for value in moved.values()]


LOST = (
    "model.model.norm.register_forward_pre_hook(lambda _, args: (args[0].detach(),) if os.environ.get('CUT') else None)"
)


def test_check_gradients_after_a_resume_finds_tensors_that_lost_their_gradient(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "task.py"
    own.write_text("import os\n" + TASK.format(change=LOST, sparse=""))
    what = recipe(inputs, task=str(own), train={"max_steps": 45})
    run = prepare(what, cpu=True, output=tmp_path / "run")
    for step in steps(run):
        if step.number == 22:
            saved = save_checkpoint(run, step.number)
            break
    assert len(list(steps(prepare(what, cpu=True, resume=saved)))) == 23
    monkeypatch.setenv("CUT", "1")
    with pytest.raises(RunError, match=r"19 of 23 trained tensors had no gradient in 20 steps: model.embed_tokens"):
        list(steps(prepare(what, cpu=True, resume=saved)))


def test_steps_refuses_trained_tensors_that_were_frozen_meanwhile(inputs: Path) -> None:
    run = prepare(recipe(inputs, adapter=LORA), cpu=True)
    shapes = run.hardware.trained_shapes(run.model)
    first = next(iter(shapes))
    with pytest.raises(RunError, match=rf"1 of {len(shapes)} trained tensors .*{first}.*ftcli.disable_adapter"):
        for _ in steps(run):
            run.model.get_parameter(first).requires_grad_(False)
    assert run.hardware.trained_shapes(run.model) == shapes
    assert len(list(run.hardware.state_shards(run.model, run.optimizer))) == len(shapes)
    assert [name for name, _ in run.hardware.parameters(run.model, trained_only=True)] == list(shapes)


def test_disable_adapter_gives_the_base_model_and_restores_the_adapter(inputs: Path) -> None:
    changes = {"modules_to_save": ["lm_head"], "use_dora": True}
    run = prepare(recipe(inputs, adapter=LORA | changes, new_tokens=tuple(NEW), train={"max_steps": 2}), cpu=True)
    batch = run.any_batch()
    with disable_adapter(run.model):
        base = run.task.loss(run.model, batch)
    for _ in steps(run):
        pass
    before = {name: parameter.requires_grad for name, parameter in run.model.named_parameters()}
    trained = run.task.loss(run.model, batch)
    with disable_adapter(run.model):
        with disable_adapter(run.model):
            assert torch.equal(run.task.loss(run.model, batch), base)
        actual = run.task.loss(run.model, batch)
    assert torch.equal(actual, base) and not actual.requires_grad
    assert torch.equal(run.task.loss(run.model, batch), trained) and not torch.equal(trained, base)
    assert {name: parameter.requires_grad for name, parameter in run.model.named_parameters()} == before
    with pytest.raises(InputError, match="the model has no adapter"), disable_adapter(torch.nn.Linear(1, 1)):
        pass


def test_check_gradients_names_tensors_cut_off_from_the_loss_and_no_lora_weights(inputs: Path, tmp_path: Path) -> None:
    cut = "model.model.norm.register_forward_pre_hook(lambda module, args: (args[0].detach(),))"
    with pytest.raises(RunError, match=r"19 of 23 .*model.embed_tokens.weight, .* and 11 more"):
        watched(inputs, tmp_path, cut)
    for count in (1, 2):  # A has its first gradient in the second step
        assert len(
            list(steps(prepare(recipe(inputs, adapter=LORA, train={"max_steps": count}, schedule={}), cpu=True)))
        )


def test_new_tokens_start_as_the_mean_and_known_tokens_are_refused(inputs: Path) -> None:
    model: Any = prepare(recipe(inputs, new_tokens=tuple(NEW)), cpu=True).model
    for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        assert weight.shape[0] == 260
        torch.testing.assert_close(weight[258:], weight[:258].mean(dim=0).expand(2, -1))
    with pytest.raises(InputError, match=r"model.new_tokens: the tokenizer already has <\|im_end\|>"):
        prepare(recipe(inputs, new_tokens=("<|im_end|>",)), cpu=True)


def test_new_tokens_with_an_adapter_train_only_the_new_rows(inputs: Path, tmp_path: Path) -> None:
    run = trained(recipe(inputs, adapter=LORA, new_tokens=tuple(NEW)), tmp_path / "run")
    stored = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    rows = {name: tuple(value.shape) for name, value in stored.items() if "lora_" not in name}
    assert set(rows.values()) == {(2, 32)} and len(rows) == 2
    assert not any(p.requires_grad for n, p in run.model.named_parameters() if "base_layer" in n)


def test_prepare_with_a_damaged_adapter_is_refused(inputs: Path, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "adapter", inputs)
    mine = {"type": "lora", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "path": str(folder)}
    values = load_file(folder / "adapter_model.safetensors")
    save_file(dict(list(values.items())[1:]), folder / "adapter_model.safetensors")
    with pytest.raises(InputError, match="is missing"):
        prepare(recipe(inputs, adapter=mine), cpu=True)
    (folder / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match="cannot be read"):
        prepare(recipe(inputs, adapter=mine), cpu=True)
