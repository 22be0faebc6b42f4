"""What `ftcli parity` concludes from runs: exact sentences, tolerances by precision, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ftcli.checkpoint.weight_distance import StoredValues
from ftcli.config.load import dump_recipe
from ftcli.config.profile import load_profile
from ftcli.config.recipe import Recipe
from ftcli.reports import parity
from ftcli.reports.comparison import TOLERANCES, Curve, compare, comparison_table, difference
from ftcli.runtime.errors import InputError
from ftcli.runtime.run_folder import RunFolder
from ftcli.testing import save_hollow

from ...support.recipes import minimal_values

STEPS = 4
LOSSES = [2.5, 2.4, 2.29, 2.2]


def a_run(folder: Path, label: str = "ddp x2, micro 2", changes: dict[int, Any] | None = None, **more: Any) -> Curve:
    """Write a run folder by hand; `changes` maps a step to other values of its row, `further` is of the evaluation."""
    run = RunFolder(folder)
    for step, loss in enumerate(LOSSES, start=1):
        row = {"step": step, "loss": loss, "grad_norm": 1.5, "learning_rate": 0.1, "items": 12, "samples": 7}
        run.write_text("status.json", "{}")
        run.append_metrics(row | (changes or {}).get(step, {}))
        if step == STEPS:
            run.append_metrics({"step": step, "eval/loss": more.get("evaluation", 2.0), **more.get("further", {})})
    start = {"weights": {"a": "0" * 64, "b": more.get("digest", "1" * 64)}, "dropout": more.get("dropout", 0.0)}
    start["uncompared_metrics"] = ["perplexity", "f1", "accuracy"]
    run.write_json("start.json", start)
    run.final.mkdir()
    save_file({"a": np.full(4, more.get("weight", 1.0), "float32")}, run.final / "model.safetensors")
    return Curve.of(label, run)


@pytest.fixture
def single(tmp_path: Path) -> Curve:
    return a_run(tmp_path / "single", "single x1, micro 2")


def sentence(run: Curve, expected: Curve, precision: str = "fp32", *, is_held: bool = True) -> str:
    departure = compare(run, expected, TOLERANCES[precision], is_held=is_held).departure
    return "" if departure is None else str(departure)


def test_equal_runs_have_no_distance(tmp_path: Path, single: Curve) -> None:
    comparison = compare(a_run(tmp_path / "ddp"), single, TOLERANCES["fp32"])
    assert (comparison.loss, comparison.drift, comparison.grad_norm, comparison.weights, comparison.evaluation) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert (
        comparison.learning_rates
        and comparison.samples
        and comparison.items
        and comparison.start
        and comparison.departure is None
    )


def test_distances_are_relative_and_the_drift_is_signed(tmp_path: Path, single: Curve) -> None:
    comparison = compare(
        a_run(tmp_path / "ddp", changes={1: {"loss": 2.0}, 4: {"loss": 2.31}}), single, TOLERANCES["fp32"]
    )
    assert comparison.loss == pytest.approx(0.2)
    assert comparison.drift == pytest.approx((-0.2 + 0.05) / 4)


# What differs -> the sentence that names it.
SENTENCES: list[tuple[dict[str, Any], str]] = [
    ({"changes": {3: {"loss": 2.31}}}, "loss leaves the tolerance at step 3: 2.31 against 2.29 (8.7e-03 > 1e-05)"),
    (
        {"changes": {2: {"grad_norm": 1.53}}},
        "gradient norm leaves the tolerance at step 2: 1.53 against 1.5 (2.0e-02 > 0.0001)",
    ),
    ({"changes": {2: {"learning_rate": 0.2}}}, "learning rate differs at step 2: 0.2 against 0.1"),
    ({"changes": {2: {"items": 11, "loss": 9.0}}}, "number of items differs at step 2: 11 against 12"),
    ({"changes": {4: {"samples": 8}}}, "digest of the rows differs at step 4: 8 against 7"),
    (
        {"changes": {1: {"loss": float("nan")}}},
        "loss is finite in one run only at step 1: nan against 2.5. Step 1 was skipped in one run only",
    ),
    ({"evaluation": float("nan")}, "evaluation loss is finite in one run only at step 4: nan against 2"),
    ({"evaluation": 2.1}, "evaluation loss leaves the tolerance at step 4: 2.1 against 2 (5.0e-02 > 1e-05)"),
    ({"digest": "f" * 64, "weight": 9.0}, "initial weight b differs: ffffffffffff against 111111111111"),
    ({"weight": 1.2}, "distance of the final weights leaves the tolerance (5.0e-01 > 0.05)"),
]


@pytest.mark.parametrize(("changes", "expected"), SENTENCES, ids=[text.split(":")[0] for _, text in SENTENCES])
def test_parity_names_the_first_departure(
    changes: dict[str, Any], expected: str, tmp_path: Path, single: Curve
) -> None:
    assert sentence(a_run(tmp_path / "ddp", **changes), single) == f"ddp x2, micro 2: {expected}"


def test_parity_compares_notes_in_training_and_in_evaluations(tmp_path: Path) -> None:
    notes = {step: {"train/kl": 0.5, "train/logps": -20.0} for step in range(1, STEPS + 1)}
    evaluation = {"eval/kl": 0.4, "eval/logps": -20.0, "eval/perplexity": 7.0}
    first_run = a_run(tmp_path / "single", "single x1, micro 2", notes, further=evaluation)
    # Relative above 1, absolute below. A metric that rounding may change by any amount may differ.
    near = {step: {"train/kl": 0.500009, "train/logps": -20.0001} for step in notes}
    near_run = a_run(tmp_path / "near", changes=near, further=evaluation | {"eval/perplexity": 9.0})
    comparison = compare(near_run, first_run, TOLERANCES["fp32"])
    assert comparison.departure is None and comparison.further == pytest.approx(9e-6, rel=1e-3)
    faults: list[tuple[dict[str, Any], str]] = [
        (
            {"changes": notes | {2: {"train/kl": 0.6, "train/logps": -20.0}}},
            "train/kl leaves the tolerance at step 2: 0.6",
        ),
        ({"changes": notes | {2: {"train/kl": 0.5}}}, "train/logps differs at step 2: none against -20"),
        ({"further": evaluation | {"eval/logps": -21.0}}, "eval/logps leaves the tolerance at step 4: -21"),
        ({"further": {"eval/kl": 0.4}}, "eval/logps differs at step 4: none against -20"),
    ]
    for number, (fault, words) in enumerate(faults):
        given = {"changes": notes, "further": evaluation} | fault
        assert words in sentence(a_run(tmp_path / f"fault {number}", **given), first_run)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("value", "reference", "expected"),
    [(INF, INF, 0.0), (NAN, NAN, 0.0), (INF, NAN, 0.0), (NAN, -INF, 0.0), (NAN, 1.0, INF), (1.0, INF, INF)],
)
def test_difference_of_values_that_are_not_finite_is_never_nan(value: float, reference: float, expected: float) -> None:
    assert difference(value, reference) == difference(value, reference, least=1.0) == expected


@pytest.mark.parametrize("step", [1, 3])  # `max` kept or dropped a NaN by its position
@pytest.mark.parametrize("pair", [(INF, INF), (NAN, NAN), (INF, NAN), (NAN, INF)])
def test_parity_of_runs_that_skip_the_same_step_holds(pair: tuple[float, float], step: int, tmp_path: Path) -> None:
    def skipping(label: str, value: float) -> Curve:
        changes = {step: dict.fromkeys(("loss", "grad_norm", "train/kl"), value)}
        return a_run(tmp_path / label, label, changes, evaluation=value, further={"eval/similarity": value})

    comparison = compare(skipping("ddp", pair[0]), skipping("single", pair[1]), TOLERANCES["fp16"])
    assert comparison.departure is None
    values = comparison.loss, comparison.drift, comparison.grad_norm, comparison.evaluation, comparison.further
    assert values == (0, 0, 0, 0, 0)
    table = "\n".join(comparison_table("single", [comparison]))
    assert table.endswith("yes") and "nan" not in table


@pytest.mark.parametrize(("value", "reference"), [(INF, 1.5), (NAN, 1.5), (1.5, NAN)])
def test_parity_of_a_step_that_one_run_skips_fails(value: float, reference: float, tmp_path: Path) -> None:
    ddp, single = (
        a_run(tmp_path / label, label, {2: {"grad_norm": norm}, 3: {"loss": 9.0}})
        for label, norm in (("ddp", value), ("single", reference))
    )
    comparison = compare(ddp, single, TOLERANCES["fp16"])
    assert (comparison.loss, comparison.grad_norm) == (0, INF)
    assert str(comparison.departure) == (
        f"ddp: gradient norm is finite in one run only at step 2: {value:.7g} against {reference:.7g}. "
        "Step 2 was skipped in one run only"
    )


def test_parity_of_fp16_names_the_step_that_overflows_with_more_rows_in_a_pass(tmp_path: Path) -> None:
    """Under fp16 the rows of a pass decide which gradients overflow. Runs that skip the same step are equal."""
    from ftcli import prepare, steps
    from ftcli.testing import save_tiny_causal

    save_tiny_causal(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"text": "abcdefgh"}\n' * 12)  # equal rows: twice as many have twice the sum

    def trained(micro_size: int, scale: float, name: str) -> Curve:
        values = minimal_values(
            "pretrain",
            precision="fp16",
            model={"name": str(tmp_path / "model"), "dropout": 0.0},
            data={"train": str(tmp_path / "rows.jsonl"), "max_length": 16},
            batch={"global_size": 6, "micro_size": micro_size},
            train={"max_steps": 1},
            log={"every_steps": 1},
        )
        run = prepare(Recipe.model_validate(values), cpu=True, output=tmp_path / name)
        assert run.hardware.loss_scale is not None
        run.hardware.loss_scale.scale = scale
        list(steps(run))
        (tmp_path / name / "final").mkdir()
        return Curve(name, RunFolder(tmp_path / name).metrics(), {}, tmp_path / name / "final")

    scales = [2.0**exponent for exponent in range(16, 24)]
    whole = next(run for scale in scales if (run := trained(6, scale, f"{scale:g}")).rows[0]["skipped_steps"])
    scale = float(whole.label)
    assert sentence(trained(6, scale, "again"), whole, "fp16") == ""
    text = sentence(trained(3, scale, "halves"), whole, "fp16")
    assert text.startswith("halves: gradient norm is finite in one run only at step 1: ")
    assert text.endswith(" against inf. Step 1 was skipped in one run only")


def test_parity_compares_every_metric_of_an_evaluation_but_those_that_the_task_names(tmp_path: Path) -> None:
    metrics = {"eval/similarity": 0.5, "eval/rewards/margins": 6e-7, "eval/distance": 40.0, "eval/french/loss": 2.0}
    reference = a_run(tmp_path / "single", "single", further=metrics | {"eval/f1/red": 0.5, "eval/perplexity": 7.0})

    def against(label: str, **changes: float) -> str:
        changed = {f"eval/{name}": value for name, value in changes.items()}
        return sentence(a_run(tmp_path / label, label, further=metrics | changed), reference)

    # A mean that cancels: 1e-4 relative, 6e-11 absolute. Counts and exp(loss) may differ by any amount.
    assert (
        against("near", **{"rewards/margins": 6.0006e-7, "distance": 40.0003, "f1/red": 0.4, "perplexity": 9.0}) == ""
    )
    assert against("far", similarity=0.501).startswith(
        "far: eval/similarity leaves the tolerance at step 4: 0.501 against 0.5 (1.0e-03 > 1e-05)"
    )
    assert "eval/distance leaves the tolerance" in against("farther", distance=40.01)
    assert "eval/french/loss leaves the tolerance" in against("source", **{"french/loss": 2.001})
    assert "eval/similarity is finite in one run only at step 4: nan against 0.5" in against("nan", similarity=NAN)
    assert "eval/more differs at step 4: 1 against none" in against("more", more=1.0)


def test_parity_compares_the_loss_of_a_source_that_has_the_name_of_a_metric(tmp_path: Path) -> None:
    one, other = (
        a_run(tmp_path / label, label, further={"eval/accuracy/loss": loss}) for label, loss in (("a", 2.1), ("b", 2.0))
    )
    assert "eval/accuracy/loss leaves the tolerance" in sentence(one, other, "bf16")


def test_parity_names_the_earliest_step_of_any_quantity(tmp_path: Path, single: Curve) -> None:
    later = a_run(tmp_path / "ddp", changes={4: {"items": 1}, 2: {"grad_norm": 9.0}, 3: {"loss": 9.0}})
    assert "gradient norm leaves the tolerance at step 2" in sentence(later, single)


def test_bf16_rounds_more_than_fp32(tmp_path: Path, single: Curve) -> None:
    changed = a_run(tmp_path / "ddp", changes={3: {"loss": 2.29 * 1.003, "grad_norm": 1.5 * 1.02}})
    assert sentence(changed, single, "bf16") == ""
    assert "loss leaves the tolerance at step 3" in sentence(changed, single, "fp32")


def test_parity_with_a_run_that_is_shorter_or_has_other_weights_differs(tmp_path: Path, single: Curve) -> None:
    changed = a_run(tmp_path / "ddp")
    short = Curve(changed.label, changed.rows[:2], changed.start, changed.final)
    assert sentence(short, single) == "ddp x2, micro 2: number of steps differs: 2 against 4"
    save_file({"other": np.ones(4, "float32")}, changed.final / "model.safetensors")
    assert sentence(changed, single) == "ddp x2, micro 2: list of final weights differs"


def test_parity_without_a_bound_still_compares_exact_quantities(tmp_path: Path, single: Curve) -> None:
    free = {"loss": 9.0, "grad_norm": 9.0}
    assert sentence(a_run(tmp_path / "a", changes={1: free}, weight=9.0), single, is_held=False) == ""
    text = sentence(a_run(tmp_path / "b", changes={1: free | {"samples": 8}}), single, is_held=False)
    assert text == "ddp x2, micro 2: digest of the rows differs at step 1: 8 against 7"


# Which runs are started, and which of them are compared


def a_recipe(tmp_path: Path, **changes: Any) -> Recipe:
    save_hollow(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "label": "b"}\n' * 24)
    values: dict[str, Any] = minimal_values(
        "text_classification",
        model={"name": str(tmp_path / "model")},
        data={"train": {"path": str(tmp_path / "rows.jsonl")}},
        batch={"global_size": 12, "micro_size": 4},
        train={"max_steps": STEPS},
    )
    return Recipe.model_validate(values | changes)


def labels(tmp_path: Path, profiles: list[str], processes: list[int], sizes: list[Any]) -> list[str]:
    planned = parity.combinations(a_recipe(tmp_path), profiles, processes, sizes, cpu=True)
    return [combination.label for combination in planned]


def test_parity_every_distributed_profile_runs_on_every_number_of_processes(tmp_path: Path) -> None:
    assert labels(tmp_path, ["single", "ddp", "fsdp"], [2, 3], [4]) == [
        "single x1, micro 4",
        "ddp x2, micro 4",
        "ddp x3, micro 4",
        "fsdp x2, micro 4",
        "fsdp x3, micro 4",
    ]


def test_parity_every_profile_runs_at_every_micro_size(tmp_path: Path) -> None:
    assert labels(tmp_path, ["single", "ddp"], [3], [4, 1]) == [
        "single x1, micro 4",
        "single x1, micro 1",
        "ddp x3, micro 4",
        "ddp x3, micro 1",
    ]


def test_parity_with_auto_among_the_micro_sizes_runs_each_profile_with_passes_by_tokens(tmp_path: Path) -> None:
    assert labels(tmp_path, ["single", "ddp"], [2], ["auto", 4]) == [
        "single x1, micro auto",
        "single x1, micro 4",
        "ddp x2, micro auto",
        "ddp x2, micro 4",
    ]


def test_parity_without_micro_sizes_runs_the_first_profile_at_a_smaller_one_too(tmp_path: Path) -> None:
    assert labels(tmp_path, ["single", "ddp"], [2], []) == [
        "single x1, micro 4",
        "ddp x2, micro 4",
        "single x1, micro 3",
    ]


@pytest.mark.parametrize(
    ("profiles", "processes", "sizes", "message"),
    [
        (["single"], [], [4], "one run cannot be compared"),
        (["ddp", "ddp"], [2], [], "ddp-x2-micro-4 would run twice"),
        (["single", "ddp"], [5], [], "batch.global_size 12 cannot be divided evenly over 5 processes"),
        (["single", "dpd"], [2], [], "'dpd' is neither a profile file"),
    ],
)
def test_parity_of_incomparable_runs_is_refused_before_a_run(
    profiles: list[str], processes: list[int], sizes: list[int], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        labels(tmp_path, profiles, processes, sizes)


def test_parity_with_a_micro_size_is_given_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(dump_recipe(a_recipe(tmp_path)))
    with pytest.raises(InputError, match="--micro-sizes and --set batch.micro_size= exclude each other"):
        parity.compare_profiles("my.yaml", ["single"], micro_sizes=[2], overrides=["batch.micro_size=3"])
    assert not Path("runs").exists()


def test_parity_in_a_launched_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCLI_LAUNCHED", "0")
    with pytest.raises(InputError, match="parity launches its own processes"):
        parity.compare_profiles("my.yaml", ["single"])


def test_parity_into_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.txt").write_text("mine")
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        parity._claim_folder(tmp_path)
    parity._claim_folder(tmp_path / "new" / "one")
    assert (tmp_path / "new" / "one").is_dir()


def judged(tmp_path: Path, recipe: Recipe, runs: list[tuple[str, int, int, float]], dropout: float) -> parity.Parity:
    """Judge runs written by hand: (profile, processes, micro size, loss of the second step)."""
    planned = [parity.Combination(load_profile(name), world, size, size) for name, world, size, _ in runs]
    curves = [
        a_run(tmp_path / one.folder, one.label, {2: {"loss": loss}}, dropout=dropout)
        for one, (*_, loss) in zip(planned, runs, strict=True)
    ]
    return parity._compare_runs("my.yaml", recipe, planned, curves, tmp_path)


RUNS = [("single", 1, 2, 2.4), ("ddp", 2, 2, 2.5), ("fsdp", 2, 2, 2.5), ("fsdp", 2, 1, 2.6)]


def test_parity_without_dropout_compares_every_run_with_the_first(tmp_path: Path) -> None:
    report = judged(tmp_path, a_recipe(tmp_path), RUNS, dropout=0.0)
    assert [(one.against, one.is_held) for one in report.comparisons] == [("single x1, micro 2", True)] * 3
    assert report.exit_code == 1 and report.notes == []


@pytest.mark.parametrize("recipe", [{}, {"model": {"name": "", "batch_norm": "train"}}])
def test_parity_with_dropout_compares_equal_worlds_only(recipe: dict[str, Any], tmp_path: Path) -> None:
    if recipe:
        recipe["model"]["name"] = str(tmp_path / "model")
    report = judged(tmp_path, a_recipe(tmp_path, **recipe), RUNS, dropout=0.0 if recipe else 0.1)
    assert [(one.label, one.against, one.is_held) for one in report.comparisons] == [
        ("ddp x2, micro 2", "single x1, micro 2", False),
        ("fsdp x2, micro 2", "ddp x2, micro 2", True),
        ("fsdp x2, micro 1", "single x1, micro 2", False),
    ]
    assert report.exit_code == 0
    assert "compared only between runs with equal processes and micro-batches" in report.notes[0]
    assert "fsdp x2, micro 2 is compared with ddp x2, micro 2" in report.notes
    assert sum(line.endswith("  not checked") for line in report.lines()) == 2
    assert "the curve stays; tolerances were not checked for 2 of 3 runs" in report.lines()


def test_parity_with_sync_batch_norm_compares_runs_with_equal_rows_in_a_pass_of_all_processes(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, model={"name": str(tmp_path / "model"), "batch_norm": "sync"})
    runs = [("single", 1, 4, 2.4), ("ddp", 2, 2, 2.4), ("fsdp", 2, 2, 2.5), ("ddp", 2, 1, 2.6), ("fsdp", 2, 1, 2.6)]
    report = judged(tmp_path, recipe, runs, dropout=0.0)
    assert [(one.label, one.against, one.is_held, one.departure is None) for one in report.comparisons] == [
        ("ddp x2, micro 2", "single x1, micro 4", True, True),
        ("fsdp x2, micro 2", "single x1, micro 4", True, False),
        ("ddp x2, micro 1", "single x1, micro 4", False, True),
        ("fsdp x2, micro 1", "ddp x2, micro 1", True, True),
    ]
    assert "only between runs with equal rows in a forward pass of all processes" in report.notes[0]
    with_dropout = judged(tmp_path / "with dropout", recipe, runs[:2], dropout=0.1)
    assert [one.is_held for one in with_dropout.comparisons] == [False] and len(with_dropout.notes) == 2


def test_parity_report_prints_one_table_the_tolerances_and_the_verdict(tmp_path: Path) -> None:
    report = judged(tmp_path, a_recipe(tmp_path), RUNS[:2], dropout=0.0)
    lines = report.lines()
    assert lines[0] == "my.yaml: 4 steps in fp32; the reference is single x1, micro 2"
    assert "loss and evaluation 1e-05, gradient norm 0.0001, relative" in lines[1]
    assert lines[4].split()[:3] == ["combination", "loss", "drift"]
    assert lines[6] == (
        "ddp x2, micro 2     4.2e-02    +1.0e-02  0.0e+00        same   same  same   same     0.0e+00  0.0e+00     no"
    )
    assert "ddp x2, micro 2: loss leaves the tolerance at step 2: 2.5 against 2.4 (4.2e-02 > 1e-05)" in lines
    assert "1 of 1 leave the curve" in lines
    assert "\x1b" not in "\n".join(lines)
    assert json.loads(json.dumps(report.as_dict()))["comparisons"][0]["departure"]["step"] == 2


def test_parity_report_without_matplotlib_states_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = judged(tmp_path, a_recipe(tmp_path), RUNS[:2], dropout=0.0)
    assert report.lines()[-1] == "curves: none: matplotlib is not installed (pip install 'ftcli[notebook]')"


def test_stored_values_reads_every_dtype(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    values = {str(dtype): torch.randn(3, 5).to(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
    save_file(values | {"scalar": torch.tensor(2.5)}, tmp_path / "x.safetensors")
    stored = StoredValues(tmp_path / "x.safetensors")
    assert stored.shapes["scalar"] == ()
    for name, value in values.items():
        assert stored.shapes[name] == (3, 5)
        assert stored.read(name).tolist() == value.double().flatten().tolist()
