"""Compiled layers give the eager results, compile nothing after two lengths, and leave the rest of the model alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from ftcli.config.plan import Plan
from ftcli.data.cache import PreparedRows
from ftcli.hardware.fsdp import keep_sizes_constant
from ftcli.loop import steps
from ftcli.models.adapters import add_adapter
from ftcli.models.architectures import architecture_of, model_types_with
from ftcli.models.kernels.compile import GraphCounter, check_compile, compile_layers
from ftcli.models.kernels.compile_options import rounds_as_uncompiled_layers
from ftcli.models.kernels.document_attention import confine_to_documents, document_bounds
from ftcli.models.kernels.liger import liger_problem
from ftcli.models.structure import layers_of
from ftcli.runtime.errors import InputError
from ftcli.testing import run_on_cpu, save_tiny_causal
from ftcli.training.compilation import choose_compile
from ftcli.training.run import Run
from ftcli.training.setup import prepare

from ....gpu.test_attention_on_gpus import run
from ....support.cells import cell
from .test_document_attention import tiny
from .test_norm_casts import seen
from .test_varlen_attention import recipe


def compiled_recipe(kind: str = "x") -> Any:
    return recipe(kind, model={"name": kind, "torch_compile": True})


def test_check_compile_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_compile(compiled_recipe())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"torch_compile needs a C\+\+ compiler"):
        check_compile(compiled_recipe())
    check_compile(recipe("x"))


def test_compile_layers_that_the_recipe_asks_for_raise_their_errors(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny_causal(tmp_path))
    for falls_back in (True, False):  # who asks for compilation wants to know why it fails
        compile_layers(model, compiled_recipe(), falls_back=falls_back)
        assert torch._dynamo.config.suppress_errors == falls_back


def test_compile_layers_with_a_model_without_known_layers_is_refused() -> None:
    with pytest.raises(InputError, match="the layers of Linear are unknown"):
        compile_layers(torch.nn.Linear(1, 1), compiled_recipe())


def test_compile_layers_logs_what_is_left_out() -> None:
    model = tiny("llama")
    assert compile_layers(model, recipe("x")) == []
    assert "forward" not in vars(model.model.layers[0])


def test_names_stay_and_evaluation_is_not_compiled() -> None:
    model, before = tiny("llama"), tiny("llama")
    message = compile_layers(model, compiled_recipe())
    assert message == ["torch_compile: 3 layers, each in place; the first steps include the compilation"]
    assert list(model.state_dict()) == list(before.state_dict())
    counted, ids = GraphCounter(), torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, before(ids, use_cache=False).logits)
    counted.update(1)
    assert counted.summary() == "torch_compile: 0 graphs, the last in step 0"


def test_compile_layers_starts_the_processes_that_compile_kernels_before_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import async_compile

    starts: list[int] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: starts.append(1))
    compile_layers(tiny("llama"), recipe("x"))
    assert starts == [], "without compiled layers nothing starts"
    compile_layers(tiny("llama"), compiled_recipe())
    assert starts == [1]


LENGTHS = ([7, 1, 12], [5, 9, 4, 8], [21, 3], [2, 2, 35])  # of documents in one row, a row after the other


def in_both_ways(
    kind: str, precision: str, device: str, documents: Sequence[list[int]] = LENGTHS, **sizes: Any
) -> tuple[list[Any], list[Any], list[int]]:
    """Return logits and gradient of each row with eager layers, then with compiled ones, and the graph counts.

    `documents`: of each row; `sizes` replace some of the model's.
    """
    torch._dynamo.reset()
    counters.clear()
    model = tiny(kind, **sizes).to(device).train()
    for module in model.modules():  # dropout drops other features in the second way
        for name in ("p", "dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    confine_to_documents(model)
    draw = torch.Generator().manual_seed(1)
    rows = []
    for lengths in documents:
        ids = torch.randint(3, 97, (1, sum(lengths)), generator=draw)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        row = {"input_ids": ids, "position_ids": positions, "use_cache": False} | document_bounds(lengths, None)
        rows.append({name: value.to(device) if torch.is_tensor(value) else value for name, value in row.items()})
    plain, fast, graphs = [run(model, [row], precision) for row in rows], [], []
    compile_layers(model, compiled_recipe(kind))
    for row in rows:
        fast.append(run(model, [row], precision))
        graphs.append(int(counters["stats"]["unique_graphs"]))
    return plain, fast, graphs


class ByKernel(torch.autograd.Function):
    """Stands in for a GPU kernel: takes and returns tensors with tokens before heads."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert all(tensor.is_contiguous() for tensor in (query, key, value))
        ctx.sizes = key.shape, value.shape
        return query.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, ...]:
        return upstream.clone(), *(torch.ones(size) for size in ctx.sizes)


def test_compiled_layers_do_not_copy_attention_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr("ftcli.models.kernels.varlen_attention.choose_kernel", lambda *given, **how: "a kernel")
    monkeypatch.setattr(
        "ftcli.models.kernels.varlen_attention.attend_documents",
        lambda kernel, *qkv_and_more: ByKernel.apply(*(tensor.transpose(1, 2) for tensor in qkv_and_more[:3])),
    )
    torch._dynamo.reset()
    counters.clear()
    model = tiny("llama").train()
    confine_to_documents(model)
    compile_layers(model, compiled_recipe("llama"))
    row = {"input_ids": torch.arange(3, 43)[None], "position_ids": torch.arange(40)[None], "use_cache": False}
    for _ in range(2):
        with torch.profiler.profile(record_shapes=True) as seen:
            model(**row, **document_bounds([25, 15], None)).logits.sum().backward()
    copied = {(1, heads, 40, 8) for heads in (2, 4)}
    events = [event for event in seen.events() if event.name == "aten::clone"]
    assert events and not [event for event in events if event.input_shapes and tuple(event.input_shapes[0]) in copied]
    assert counters["stats"]["unique_graphs"] == 2, "before attention and behind it"


def trained(
    folder: Path,
    recipe_name: str = "sft-tied",
    /,
    *,
    cpu: bool = True,
    sections: Mapping[str, Any] | None = None,
    **model: Any,
) -> tuple[Run, list[float], list[int]]:
    """Return a run of a small recipe, its losses, and how many graphs were compiled up to each step."""
    torch._dynamo.reset()
    counters.clear()
    section = {"name": str(folder / "tied"), "dropout": 0.0} | model
    data = {"train": str(folder / "chats.jsonl"), "eval_rows": 5, "max_length": 128, "padding_free": True}
    changes = {"model": section, "data": data, "train": {"max_steps": 5}} | dict(sections or {})
    small_recipe = cell(folder, recipe_name, precision="bf16", **changes)
    run, graphs = prepare(small_recipe, cpu=cpu), []
    losses = []
    for step in steps(run):
        losses.append(step.loss)
        graphs.append(int(counters["stats"]["unique_graphs"]))
    return run, losses, graphs


OFFLOADED: dict[str, Any] = {"name": "x", "activation_offloading": True}
QLORA: dict[str, Any] = {"model": {"name": "x", "quantization": {"load_in_4bit": True}}, "adapter": {"type": "lora"}}


def decided(
    monkeypatch: pytest.MonkeyPatch,
    *,
    of: Any = None,
    place: str = "cuda",
    may: bool = True,
    recomputed: str = "none",
    tokens: int = 2_000_000,
    precision: str = "bf16",
    steps: int = 10_000,
    whole: bool = True,
    **sections: Any,
) -> tuple[bool, list[str]]:
    """Return the choice for a recipe without model.torch_compile, and the log lines. `tokens`: tokens of an epoch."""
    monkeypatch.setattr("ftcli.training.compilation.is_installed", lambda name: name == "triton")
    plan = Plan(1, 10, 10, 1, rows=1000, steps_per_epoch=100, steps=steps, warmup_steps=0)
    rows = PreparedRows(Dataset.from_dict({"input_ids": [[0] * (tokens // 1000)] * 1000}), None, {})
    given = recipe("x", precision=precision, **sections)
    how: dict[str, Any] = {"device_type": place, "may_compile": may, "is_whole": whole}
    chosen, message = choose_compile(large() if of is None else of, given, plan, rows, recomputed, **how)
    return bool(chosen.model.torch_compile), message


def large(kind: str = "llama") -> Any:
    """Return a model with only a configuration, of 16 layers with 2048 features."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    model = torch.nn.Module()
    model.config = AutoConfig.for_model(kind, **sizes)
    return model


def test_compile_default_of_a_long_gpu_run_compiles_supported_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert decided(monkeypatch) == (True, [])
    assert decided(monkeypatch, **QLORA) == (True, [])
    assert decided(monkeypatch, recomputed="full", model=OFFLOADED | {"gradient_checkpointing": "full"}) == (True, [])
    assert decided(monkeypatch, tokens=20_000, steps=1000) == (True, [])  # saves 31 s
    assert decided(monkeypatch, tokens=20_000) == (True, [])  # 200 tokens a pass: the device waits for Python
    given, rows = compiled_recipe(), PreparedRows(Dataset.from_dict({}), None, {})
    plan = Plan(1, 10, 10, 1, rows=1, steps_per_epoch=1, steps=1, warmup_steps=0)
    assert choose_compile(large(), given, plan, rows, "none", device_type="cuda", may_compile=True) == (given, [])


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (
            {"tokens": 20_000, "steps": 900},
            "too short for compilation to pay off: 200 tokens a pass would save about 1 s of the device and 27 s",
        ),
        ({"precision": "fp32"}, "fp32 is meant for exact results"),
        ({"recomputed": "selective"}, "cannot be combined with the memory saving"),
        ({"may": False}, "hooks inside layers"),
        (QLORA | {"whole": False}, "4-bit weights are in shards"),
        ({"model": OFFLOADED | {"gradient_checkpointing": "none"}}, "cannot be combined with the memory saving"),
    ],
)
def test_compile_default_without_gain_logs_the_reason(
    case: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles, (lines,) = decided(monkeypatch, **case)
    assert not compiles and lines.startswith("torch_compile: none, ") and why in lines


@pytest.mark.parametrize(
    ("version", "place", "precision", "adapter", "compiles"),
    [
        ("2.11.0+cpu", "cpu", "bf16", "lora", False),
        ("2.13.0+cpu", "cpu", "bf16", "lora", True),
        ("2.11.0", "cuda", "bf16", "lora", True),
        ("2.11.0", "cpu", "fp32", "lora", True),
        ("2.11.0", "cpu", "bf16", "none", True),
    ],
)
def test_a_recipe_that_asks_is_not_compiled_where_the_losses_would_change(
    version: str, place: str, precision: str, adapter: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    model, adapters = {"name": "x", "torch_compile": True}, {"type": adapter} if adapter != "none" else {}
    chosen, lines = decided(monkeypatch, place=place, precision=precision, model=model, adapter=adapters)
    assert chosen == compiles
    assert len(lines) == (not compiles) and all("adapter round differently on CPUs" in line for line in lines)
    assert place == "cuda" or decided(monkeypatch, place=place, precision=precision, adapter=adapters) == (False, [])


def test_frozen_weights_in_16_bits_need_the_roundings_under_fp32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    model = {"name": "x", "torch_compile": True, "dtype": "bfloat16"}
    assert not decided(monkeypatch, place="cpu", precision="fp32", model=model, adapter={"type": "lora"})[0]


def test_hooks_inside_of_layers_win_over_a_recipe_that_asks_and_liger_may_take_their_place() -> None:
    rows, plan = PreparedRows(Dataset.from_dict({}), None, {}), Plan(1, 10, 10, 1, 1, 1, 1, 0)
    assert choose_compile(large(), compiled_recipe(), plan, rows, "none", device_type="cuda", may_compile=True) == (
        compiled_recipe(),
        [],
    )
    chosen, message = choose_compile(
        large(), compiled_recipe(), plan, rows, "none", device_type="cuda", may_compile=False
    )
    assert message == ["torch_compile: left out, this profile gathers weights by hooks inside layers"]
    assert chosen.model.torch_compile is False
    by_compiler = "torch.compile fuses the same operations"
    assert (
        liger_problem(compiled_recipe(), "llama", on_gpu=True)
        == by_compiler
        != liger_problem(chosen, "llama", on_gpu=True)
    )


def test_compile_default_without_a_gpu_compiles_and_logs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided(monkeypatch, place="cpu") == (False, [])


@pytest.mark.parametrize("kind", sorted(model_types_with("has_experts")))
def test_compile_layers_skips_models_with_experts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not architecture_of(kind).compiles_layers
    model = torch.nn.Module()
    model.config = AutoConfig.for_model(kind)
    assert decided(monkeypatch, of=model)[1] == [f"torch_compile: none, no gain is known for models of type {kind}"]


def test_compile_default_without_triton_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert decided(monkeypatch)[1] == ["torch_compile: none, it needs a C++ compiler and Triton"]


@pytest.mark.slow
def test_compile_layers_with_recomputation_compiles_nothing_after_the_first_steps(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # graphs without C++
    for model in ({}, {"gradient_checkpointing": True}):
        _, eager, none = trained(inputs, **model)
        run, losses, graphs = trained(inputs, torch_compile=True, **model)
        assert none[-1] == 0 and graphs[0] > 0, "nothing was compiled"
        assert graphs[1] == graphs[-1]
        assert losses == pytest.approx(eager, rel=3e-4)
        assert sum("torch_compile: 2 layers" in fact for fact in run.log_lines) == 1


SHORTEST, LONGEST = 100, 2000
WAYS_TO_STORE: dict[str, dict[str, Any]] = {
    "stored": {"gradient_checkpointing": "none"},
    "recomputed": {"gradient_checkpointing": "full", "activation_offloading": False},
    "offloaded": {"gradient_checkpointing": "full", "activation_offloading": True},
    "tiled": {"gradient_checkpointing": "tiled", "activation_offloading": False},
}


def counters_of_200_steps(
    inputs: Path, folder: Path, model: dict[str, Any], *, cpu: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train an adapter on 200 rows of different lengths; return all counters of torch after steps 3 and 200.

    Args:
        inputs: The folder of small cells.
        folder: Gets the file of rows, from 100 to 2,000 tokens in random order.
        model: The recipe's section `model`.
        cpu: Train on the CPU.
    """
    torch._dynamo.reset()
    counters.clear()
    lengths = torch.linspace(SHORTEST, LONGEST, 200).int()[
        torch.randperm(200, generator=torch.Generator().manual_seed(1))
    ]
    text = "a long text " * (LONGEST // 10)  # bytes are tokens
    rows = [json.dumps({"prompt": "p", "completion": text[: int(length) - 20]}) for length in lengths]
    (folder / "lengths.jsonl").write_text("\n".join(rows) + "\n")
    data = {"train": str(folder / "lengths.jsonl"), "max_length": LONGEST, "padding_free": True}
    sections = {"data": data, "model": model, "adapter": {"type": "lora", "r": 3, "lora_alpha": 6}}
    size = {"global_size": 1, "micro_size": 1}
    run = prepare(cell(inputs, "sft-lora", precision="bf16", batch=size, train={"max_steps": 200}, **sections), cpu=cpu)
    early: dict[str, Any] = {}
    lengths_seen = []
    for step in steps(run):
        lengths_seen.append(step.items)
        if step.number == 3:
            early = {section: dict(values) for section, values in counters.items()}
    run.hardware.release(run.model)
    assert len(set(lengths_seen)) > 150 and min(lengths_seen) < 130 and max(lengths_seen) > LONGEST - 30
    assert early["stats"]["unique_graphs"] > 0, "nothing was compiled"
    return early, {section: dict(values) for section, values in counters.items()}


@pytest.mark.slow
@pytest.mark.parametrize("stored", WAYS_TO_STORE)
def test_compiled_adapter_training_compiles_nothing_after_step_3_for_any_row_length(
    stored: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # graphs without C++
    monkeypatch.setattr("ftcli.models.kernels.compile_options.ROUNDS_ON_CPUS", "0")  # these round with every torch
    model = {"name": str(inputs / "untied"), "dropout": 0.0, "torch_compile": True} | WAYS_TO_STORE[stored]
    early, late = counters_of_200_steps(inputs, tmp_path, model, cpu=True)
    assert early == late


def adapted(monkeypatch: pytest.MonkeyPatch, recomputed: str = "none") -> Any:
    """Return a model with an adapter whose layers are compiled without a C++ compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    sections = {"model": {"name": "llama", "torch_compile": True}, "adapter": {"type": "lora", "r": 3, "lora_alpha": 6}}
    expected = recipe("llama", precision="bf16", **sections)
    model = add_adapter(tiny("llama"), expected, keep=[], task_type=None).train()
    compile_layers(model, expected, recomputed)
    return model


@pytest.mark.slow
def test_compile_layers_with_an_adapter_saves_fewer_tensors_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    less = seen(adapted(monkeypatch))
    torch._dynamo.reset()
    more = seen(adapted(monkeypatch, "full"))  # the budget of graphs that are computed again as a whole
    assert torch.equal(less[0], more[0])
    assert torch.equal(less[1], more[1])
    assert less[2] < 0.95 * more[2]


def inputs_of_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets the inputs of each graph which is compiled from now on."""
    given: list[Any] = []

    def noted(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        given.extend(inputs)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=noted))
    torch._dynamo.reset()
    return given


def test_compile_layers_passes_no_number_as_a_tensor_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs_of_graphs(monkeypatch)
    counters.clear()
    sections = {"model": {"name": "llama", "torch_compile": True}, "adapter": {"type": "lora", "r": 3, "lora_alpha": 7}}
    expected = recipe("llama", precision="bf16", **sections)
    model = add_adapter(tiny("llama"), expected, keep=[], task_type=None).train()
    compile_layers(model, expected)
    for length in (9, 14):
        model(input_ids=torch.arange(3, 3 + length)[None], use_cache=False).logits.sum().backward()
    tensors = [value for value in given if torch.is_tensor(value)]
    assert len(tensors) > 20
    assert [value.dtype for value in tensors if value.dim() == 0] == []
    assert counters["stats"]["unique_graphs"] == 1, "the first layer has a graph of its own"


@pytest.mark.parametrize("in_shards", [False, True])
def test_compile_layers_keeps_sizes_of_heads_constant_in_shards_too(
    in_shards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs_of_graphs(monkeypatch)
    model = tiny("llama").train()
    compile_layers(model, compiled_recipe("llama"))
    if in_shards:
        keep_sizes_constant()
        for module in model.modules():
            module._is_fsdp_managed_module = module._fsdp_use_orig_params = True  # as `fully_shard` marks them
    model(input_ids=torch.arange(3, 12)[None], use_cache=False)
    assert {int(value) for value in given if isinstance(value, (int, torch.SymInt))} <= {9}, "the length is a symbol"


def test_compile_layers_below_the_first_layer_with_an_adapter_computes_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    sections = {"model": {"name": "llama", "torch_compile": True}, "adapter": {"type": "lora", "r": 3, "lora_alpha": 7}}
    expected = recipe("llama", precision="fp32", **sections)
    model = add_adapter(tiny("llama"), expected, keep=[], task_type=None).train()
    layers = layers_of(model)
    layers[0].requires_grad_(False)
    inputs: list[bool] = []
    for layer in layers:
        layer.input_layernorm.register_forward_hook(lambda _module, _args, output: inputs.append(output.requires_grad))
    compile_layers(model, expected)
    model(input_ids=torch.arange(3, 12)[None], use_cache=False).logits.sum().backward()
    assert inputs == [False, *[True] * (len(layers) - 1)]
    assert all(p.grad is not None for p in layers[1].parameters() if p.requires_grad)


@pytest.mark.slow
def test_compile_layers_first_row_as_long_as_the_hidden_size_compiles_nothing_after_one_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    model = adapted(monkeypatch)
    hidden = model.config.hidden_size
    before = counters["stats"]["unique_graphs"]
    results = []
    for length in (hidden, hidden - 5, 2 * hidden + 1):
        model(input_ids=torch.randint(3, 97, (1, length)), use_cache=False).logits.sum().backward()
        results.append(counters["stats"]["unique_graphs"] - before)
    assert results[0] > 0
    assert results == [results[0]] * 3


@pytest.mark.slow
def test_compile_layers_gives_the_losses_of_eager_layers(inputs: Path) -> None:
    assert trained(inputs, torch_compile=True)[1] == pytest.approx(trained(inputs)[1], rel=3e-4)


def distances_from_eager_layers(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, *, cpu: bool, **model: Any
) -> tuple[float, float]:
    """Return how far the losses of compiled layers with an adapter are from those of eager layers.

    The learning rate is small, so that much of what the adapter adds is lost by rounding.

    Returns:
        (the largest relative distance of a step as ftcli compiles, that with torch's own roundings).
    """
    from torch._inductor import config

    sections = {"optimizer": {"learning_rate": 1e-4}, "schedule": {"name": "constant"}}
    eager = trained(inputs, "sft-lora", cpu=cpu, sections=sections, **model)[1]

    def distance() -> float:
        losses = trained(inputs, "sft-lora", cpu=cpu, sections=sections, torch_compile=True, **model)[1]
        return max(abs(a / b - 1) for a, b in zip(losses, eager, strict=True))

    exact = distance()
    monkeypatch.setattr("ftcli.models.kernels.compile_options._round_like_uncompiled_layers", lambda recipe: None)
    with config.patch(emulate_precision_casts=False):  # monkeypatch would delete the setting in the end
        other = distance()
    print(f"from layers as they are: {exact:.1e}, with other roundings {other:.1e}")
    return exact, other


@pytest.mark.slow
def test_compile_layers_with_an_adapter_rounds_as_eager_layers(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not rounds_as_uncompiled_layers(recipe("x", precision="bf16", adapter={"type": "lora"}), "cpu"):
        pytest.skip("this torch does not round there on CPUs")
    exact, other = distances_from_eager_layers(inputs, monkeypatch, cpu=True)
    assert exact < 0.2 * other


def losses_of_both(folder: Path, name: str) -> tuple[list[float], list[float], bool]:
    from ftcli.hardware import deepspeed

    deepspeed.STAGE_3 = deepspeed.STAGE_3 | {"stage3_param_persistence_threshold": 100}  # small weights stay whole
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    eager, (run, compiled, graphs) = trained(folder, name), trained(folder, name, torch_compile=True)
    assert run.compiled == (graphs[-1] > 0)
    return eager[1], compiled, run.compiled


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "name"), [("fsdp", "sft-tied"), ("zero3", "sft-tied"), ("zero3", "sft-lora")])
def test_compile_layers_on_every_profile_trains_or_is_left_out(inputs: Path, profile: str, name: str) -> None:
    for eager, compiled, is_compiled in run_on_cpu(losses_of_both, inputs, name, profile=profile):
        assert compiled == pytest.approx(eager, rel=3e-4)
        assert is_compiled == (name != "sft-lora"), "where something is frozen, ZeRO-3's hooks stand inside of layers"
