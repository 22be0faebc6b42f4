"""The speed tables: operations per token by hand, the rows of each rank, agreement of curves, and goals."""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import cell_tables  # noqa: E402
from cells import curves, flops, goals  # noqa: E402
from cells.cell import Cell, inputs_of  # noqa: E402
from cells.ours import overrides_of  # noqa: E402
from cells.rows import Documents, PackedRows, as_row, draw_documents, draw_pairs, write_recipe  # noqa: E402
from cells.trl_dpo import as_pairs  # noqa: E402

from ftcli.config.load import load_recipe  # noqa: E402

LLAMA = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
}


def save_header(folder: Path, shapes: dict[str, list[int]]) -> None:
    header = json.dumps({name: {"shape": shape} for name, shape in shapes.items()} | {"__metadata__": {}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / "config.json").write_text(json.dumps(LLAMA))


def test_multiplied_without_lookup_embeddings_counts_a_tied_head_once(tmp_path: Path) -> None:
    save_header(tmp_path, {"model.embed_tokens.weight": [10, 8], "model.layers.0.q_proj.weight": [12, 8]})
    assert flops.multiplied(flops.weights_of(tmp_path)) == 80 + 96
    shapes = {"model.embed_tokens.weight": [10, 8], "lm_head.weight": [10, 8], "model.norm.weight": [8]}
    save_header(tmp_path, shapes)
    assert flops.multiplied(flops.weights_of(tmp_path)) == 80 + 8


def test_multiplied_of_an_encoder_counts_patch_projections_only() -> None:
    weights = {
        "vit.embeddings.patch_embeddings.projection.weight": 5,
        "vit.embeddings.position_embeddings": 7,
        "bert.embeddings.word_embeddings.weight": 11,
        "classifier.weight": 2,
    }
    assert flops.multiplied(weights) == 5 + 2


def test_flops_equal_six_per_weight_and_twelve_per_token_pair(tmp_path: Path) -> None:
    save_header(tmp_path, {"model.embed_tokens.weight": [10, 8]})
    squares = 3 * 3 + 4 * 4
    assert flops.flops(tmp_path, 7, squares) == 6 * 80 * 7 + 12 * 2 * 4 * 3 * squares


def test_flops_of_frozen_weights_equal_four_per_weight(tmp_path: Path) -> None:
    save_header(tmp_path, {"model.embed_tokens.weight": [10, 8]})
    queries, keys = 12, 6
    adapter = 2 * 5 * (2 * (8 + queries) + 2 * (8 + keys) + 3 * (8 + 16))
    assert flops.flops(tmp_path, 7, 0, lora=5) == (4 * 80 + 6 * adapter) * 7


def documents(lengths: list[int]) -> Documents:
    ids = np.arange(10, 10 + sum(lengths), dtype=np.int32)
    return Documents(ids, np.ones(len(ids), dtype=bool), np.array(lengths))


def test_documents_labels_ignore_the_first_token_of_each_document() -> None:
    micro_batch = documents([2, 3])
    assert micro_batch.positions.tolist() == [0, 1, 0, 1, 2]
    assert micro_batch.labels.tolist() == [-100, 11, -100, 13, 14]
    assert micro_batch.items == 3


def test_micro_batches_of_two_ranks_alternate(tmp_path: Path) -> None:
    micro_batch = documents([1] * 16)
    path = tmp_path / "rows.npz"
    empty = np.array([], dtype=np.uint64)
    np.savez(
        path,
        ids=micro_batch.ids,
        trained=micro_batch.trained,
        lengths=micro_batch.lengths,
        documents=np.array([2] * 8),
        digests=empty,
        targets=empty,
        paths=empty,
    )
    rows = PackedRows(path, global_size=4)
    assert len(rows) == 8
    assert rows.step(1).ids.tolist() == list(range(18, 26))
    taken = [rows.micro_batches(1, micro_size=1, rank=rank, processes=2) for rank in (0, 1)]
    assert [[part.ids.tolist() for part in parts] for parts in taken] == [
        [[18, 19], [22, 23]],
        [[20, 21], [24, 25]],
    ]


def test_draw_documents_fills_all_rows_and_is_reproducible() -> None:
    cell = Cell(peer="bare", shape="tiny", length=64, micro_size=2, steps=10)
    drawn = draw_documents(cell, 512)
    assert sum(len(words) + 1 for words in drawn) >= 2 * 10 * 64
    assert max(len(words) for words in drawn) == 63
    assert [words.tolist() for words in drawn] == [words.tolist() for words in draw_documents(cell, 512)]


def test_as_row_returns_the_columns_of_each_task() -> None:
    assert as_row([5, 6, 7], "pretrain") == {"text": "5 6 7"}
    assert as_row([5, 6, 7], "sft") == {"prompt": "5 ", "completion": "6 7"}
    assert as_row([5, 6], "text_classification") == {"text": "5 6", "label": "odd"}


def test_cells_with_the_same_rows_keep_their_own_micro_batches(tmp_path: Path) -> None:
    cells = [
        Cell(peer="ftcli", shape="tiny", length=64, micro_size=size, accumulation=8 // size, task="preference")
        for size in (4, 2)
    ]
    inputs = inputs_of(cells[0], tmp_path)
    assert inputs_of(cells[1], tmp_path) == inputs
    inputs.model.mkdir(parents=True)
    (inputs.model / "config.json").write_text('{"vocab_size": 512}')
    write_recipe(cells[0], inputs)
    sizes = [load_recipe(inputs.recipe, overrides_of(cell, inputs)).batch.micro_size for cell in cells]
    assert sizes == [4, 2]


def test_draw_pairs_fit_into_the_length_and_are_reproducible() -> None:
    cell = Cell(peer="ftcli", shape="tiny", length=64, micro_size=2, accumulation=2, steps=10, task="preference")
    pairs = draw_pairs(cell, 512)
    assert len(pairs) == 2 * 2 * 10 and pairs == draw_pairs(cell, 512)
    for side in ("chosen", "rejected"):
        assert max(len(f"{pair['prompt']}{pair[side]}".split()) + 1 for pair in pairs) <= 64


def test_as_pairs_divides_prompt_and_answers_and_sorts_the_pairs_of_a_step(tmp_path: Path) -> None:
    pairs = [(1, 4, 2), (2, 1, 1), (1, 1, 3), (1, 1, 1)]  # tokens of the prompt and of both answers
    sides = [(prompt, answer) for prompt, *answers in pairs for answer in answers]
    trained = [mark for prompt, answer in sides for mark in [False] * prompt + [True] * answer]
    empty = np.array([], dtype=np.uint64)
    np.savez(
        tmp_path / "rows.npz", ids=np.arange(len(trained)), trained=np.array(trained), digests=empty, targets=empty,
        lengths=np.array([sum(side) for side in sides]), documents=np.array([2] * 4), paths=empty,
    )  # fmt: skip
    rows = PackedRows(tmp_path / "rows.npz", global_size=2)
    first, *_ = plain = as_pairs(rows, is_sorted=False).to_list()
    assert first == {"prompt_ids": [0], "chosen_ids": [1, 2, 3, 4], "rejected_ids": [6, 7]}
    assert as_pairs(rows, is_sorted=True).to_list() == [plain[1], plain[0], plain[3], plain[2]]


def line(peer: str, speed: float, precision: str = "bf16_pure", **fields: object) -> dict:
    cell = Cell(peer=peer, shape="llama-3.2-1b", length=4096, micro_size=4, task="pretrain", precision=precision)
    values = vars(cell) | {"cell": cell.key, goals.SPEED: speed, "losses": [4.0, 2.0], "grad norms": [1.0, 1.0]}
    return values | {"time": 0.0, "device": "NVIDIA H200"} | fields


MEASURED = {
    "MFU": 0.5,
    "step p50": 0.25,
    "step p95": 0.3,
    "peak allocated GiB": 2.0,
    "first step": 3.0,
    "trained tokens a second a GPU": 1.0,
    "rows a second a GPU": 1.0,
}


def rows_of_table(lines: list[dict]) -> list[dict[str, str]]:
    """The rows of the first cell's table, by column."""
    judged = curves.judged(lines)
    cell, *_ = cell_tables.cells_of(judged)
    rows = [row.strip("| ").split(" | ") for row in cell_tables.table(cell, judged)[4:-1]]
    return [dict(zip(["name", *cell_tables.HEAD[1:]], row, strict=True)) for row in rows]


def test_compare_agrees_within_the_tolerances_of_loss_and_norm() -> None:
    masters = line("bare", 1.0, "bf16")
    assert curves.compare(masters, [masters]) == {}
    near = line("ftcli", 1.0, "bf16", losses=[4.0, 2.03], **{"grad norms": [1.0, 1.04]})
    comparison = curves.compare(near, [masters])
    assert comparison["agrees"] and comparison["apart"] == pytest.approx({"losses": 0.015, "grad norms": 0.04})
    assert not curves.compare(line("ftcli", 1.0, "bf16", losses=[4.0, 2.05]), [masters])["agrees"]
    assert not curves.compare(line("ftcli", 1.0, "bf16", **{"grad norms": [1.0, float("nan")]}), [masters])["agrees"]


def test_read_with_an_old_line_renames_told_to_details(tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_text('{"peer": "trl", "told": {"bf16": true}}\n{"peer": "ftcli", "details": {}}\n')
    assert curves.read(path) == [{"peer": "trl", "details": {"bf16": True}}, {"peer": "ftcli", "details": {}}]


def test_judged_compares_bf16_pure_with_float32_weights() -> None:
    masters, rounded = line("bare", 1.0, "bf16"), line("bare", 1.0, losses=[4.0, 3.0])
    for lines in ([masters, rounded], [rounded, masters]):
        comparison = curves.judged([*lines, line("ftcli", 1.0, agrees=False)])
        assert [one.get("agrees") for one in comparison if one["peer"] == "ftcli"] == [True]
        assert [one.get("agrees") for one in comparison if one["precision"] == "bf16_pure"] == [False, True]


def test_judged_compares_zero3_with_fsdp() -> None:
    comparison = {}
    for profile, losses in (("fsdp", [4.0, 2.0]), ("zero3", [4.0, 3.0])):
        comparison[profile] = line("bare", 1.0, "bf16", losses=losses)
        comparison[profile]["cell"] = comparison[profile]["cell"] | {"profile": profile}
    ours = line("ftcli", 1.0, "bf16") | {"cell": comparison["zero3"]["cell"]}
    for lines, agree in (
        ([comparison["fsdp"], comparison["zero3"]], [None, False, True]),
        ([comparison["zero3"]], [None, False]),
    ):
        assert [one.get("agrees") for one in curves.judged([*lines, ours])] == agree


def test_judged_without_a_plain_reference_uses_one_with_settings() -> None:
    flash, ours = line("bare", 1.0, "bf16", settings=["attn_implementation=x"]), line("ftcli", 1.0, "bf16")
    assert [one.get("agrees") for one in curves.judged([flash, ours])] == [None, True]
    assert [one.get("agrees") for one in curves.judged([flash, line("bare", 1.0, "bf16"), ours])] == [True, None, True]


def test_compare_with_a_line_of_another_cell_returns_nothing() -> None:
    other = line("bare", 1.0, "bf16")
    assert curves.compare(line("ftcli", 1.0), [other | {"cell": other["cell"] | {"length": 8192}}]) == {}


def test_compare_with_a_line_of_more_steps_returns_nothing() -> None:
    ours, shorter = line("ftcli", 1.0, "bf16", steps=200), line("bare", 1.0, "bf16", losses=[4.0, 3.0])
    assert curves.compare(ours, [shorter]) == {}
    assert curves.compare(ours, [line("bare", 1.0, "bf16", steps=200), shorter])["agrees"]


def ratio_and_verdict(lines: list[dict], what: str) -> tuple[float | None, str]:
    return next((ratio, verdict) for goal, ratio, verdict in goals.judge(lines) if goal.what == what)


def test_judge_without_an_agreeing_curve_does_not_count() -> None:
    what = "1B bf16_pure, of TRL at its best"
    trl = line("trl", 100.0, agrees=True)
    ours = line("ftcli", 120.0, label="extras", agrees=True)
    assert ratio_and_verdict([trl], what) == (None, "not measured: ftcli")
    assert ratio_and_verdict([trl, ours], what) == (1.2, "reached")
    assert ratio_and_verdict([trl, ours | {goals.SPEED: 110.0}], what) == (pytest.approx(1.1), "missed")
    assert (
        ratio_and_verdict([trl | {"agrees": False}, ours], what)[1]
        == "reached; the other's curve differs from the reference"
    )
    assert (
        ratio_and_verdict([trl, ours | {"agrees": False}], what)[1]
        == "does not count: ftcli's curve differs from the reference"
    )
    for lines in ([trl | {"spoiled": "it rained"}, ours], [trl, ours | {"spoiled": "it rained"}]):
        assert ratio_and_verdict(lines, what)[1] == "does not count: it rained"
    del ours["agrees"]
    assert ratio_and_verdict([trl, ours], what)[1] == "does not count: no reference was measured"


def test_judge_compares_two_lines_of_ftcli_where_no_reference_was_measured() -> None:
    what = "1B x4096 ZeRO-3, two H100s, of FSDP2"
    fields = {"label": "H100", "processes": 2, "precision": "bf16"}
    fsdp, zero3 = (line("ftcli", speed, profile=name, **fields) for name, speed in (("fsdp", 100.0), ("zero3", 98.0)))
    assert ratio_and_verdict([fsdp, zero3], what) == (pytest.approx(0.98), "reached")
    other = zero3 | {"losses": [4.0, 3.0]}
    assert ratio_and_verdict([fsdp, other], what)[1] == "does not count: ftcli's curve differs from the reference"
    for rows in ({"steps": 99}, {"processes": 4}):
        verdict = ratio_and_verdict([fsdp, zero3 | rows], what)[1]
        assert verdict == "does not count: no reference was measured"


def test_judge_prefers_lines_of_one_run() -> None:
    what, later = "1B bf16_pure, of TRL at its best", 10 * goals.RUN
    trl, ours = line("trl", 100.0), line("ftcli", 120.0, label="extras", agrees=True, time=60.0)
    faster = line("ftcli", 130.0, label="extras", agrees=True, time=later)
    assert (
        ratio_and_verdict([trl, ours, faster], what) == ratio_and_verdict([faster, ours, trl], what) == (1.2, "reached")
    )
    assert ratio_and_verdict([trl, ours, faster, trl | {"time": later + 60.0}], what) == (1.3, "reached")
    for other in (trl, trl | {"time": later, "device": "NVIDIA H100 80GB HBM3"}):
        verdict = "does not count: not measured in one run on one kind of GPU"
        assert ratio_and_verdict([other, faster], what) == (None, verdict)


def test_judge_takes_the_nearest_line_of_the_other_program() -> None:
    what, ours = "1B bf16_pure, of TRL at its best", line("ftcli", 120.0, label="extras", agrees=True, time=100.0)
    near, later = line("trl", 100.0, time=160.0), line("trl", 60.0, time=100.0 + 0.9 * goals.RUN)
    for lines in ([near, later, ours], [later, ours, near]):
        assert ratio_and_verdict(lines, what) == (1.2, "reached")


def test_judge_compares_the_curves_of_ftcli_and_torchtitan_where_no_reference_was_measured() -> None:
    what = "8B x8192 FSDP2, two H200s, no flash-attn 4, of torchtitan"
    cell = {"shape": "llama-3.1-8b", "length": 8192, "processes": 2, "profile": "fsdp", "precision": "bf16"}
    ours = line("ftcli", 110.0, label="extras, no flash-attn") | cell
    theirs = line("torchtitan", 100.0) | cell
    assert ratio_and_verdict([ours, theirs], what) == (pytest.approx(1.1), "reached")
    other = ours | {"losses": [4.0, 3.0]}
    assert ratio_and_verdict([other, theirs], what)[1] == "does not count: ftcli's curve differs from the reference"


def test_judge_ignores_ladder_and_traced_lines_and_lines_without_a_patch() -> None:
    what = "1B bf16_pure, of TRL at its best"
    slow = line("ftcli", 90.0, label="extras", agrees=True)
    switched = line("ftcli", 200.0, label="ladder", settings=["log.every_steps=1"])
    traced = line("ftcli", 300.0, label="extras", traced=3)
    patched = line("ftcli", 80.0, label="extras", agrees=True, without="compiled-layers", time=1.0)
    assert ratio_and_verdict([line("trl", 100.0), slow, switched, traced, patched], what) == (0.9, "missed")


def test_ladder_compares_each_setting_with_the_base_line() -> None:
    memory = {"peak allocated GiB": 2.0}
    plain = line("ftcli", 100.0, label="no extras", **memory)
    rung = line("ftcli", 90.0, label="ladder", settings=["log.every_steps=1"], losses=[4.0, 2.02], **memory)
    another_run = plain | {goals.SPEED: 30.0, "time": 10 * goals.RUN}
    lines = [plain, rung, another_run]
    rows = cell_tables.ladder(cell_tables.cells_of(lines), lines)
    assert rows[-2].endswith("| `log.every_steps=1` | -10.0 % | +0.0 | 1e-02 |")
    rung["time"] = 5 * goals.RUN
    assert cell_tables.ladder(cell_tables.cells_of(lines), lines) == []


def test_table_has_a_ratio_only_within_one_run_and_device() -> None:
    later, card = 10 * goals.RUN, "NVIDIA H100 80GB HBM3"
    lines = [
        line("bare", 50.0, "bf16", time=0.0, **MEASURED),
        line("ftcli", 60.0, "bf16", label="old", time=1.0, **MEASURED),
        line("ftcli", 70.0, "bf16", label="alone", time=later, **MEASURED),
        line("ftcli", 80.0, "bf16", label="card", time=1.0, device=card, **MEASURED),
    ]
    ratios = {row["name"]: row["of the reference"] for row in rows_of_table(lines)}
    assert ratios == {"bare": "1.000", "ftcli (old)": "1.200", "ftcli (alone)": "-", "ftcli (card)": "-"}
    again = line("bare", 40.0, "bf16", time=later, **MEASURED)
    ratios = {row["name"]: row["of the reference"] for row in rows_of_table([*lines, again])}
    assert ratios["ftcli (old)"] == "1.200" and ratios["ftcli (alone)"] == "1.750"


def test_table_has_no_ratio_to_a_spoiled_reference() -> None:
    reference = line("bare", 50.0, "bf16", spoiled="it rained", **MEASURED)
    rows = rows_of_table([reference, line("ftcli", 60.0, "bf16", **MEASURED)])
    assert [row["of the reference"] for row in rows] == ["-", "-"]
    assert [row["curve"] for row in rows] == ["0e+00, 0e+00", "reference; **spoiled**: it rained"]


def test_table_has_the_newest_line_of_each_device_and_its_attention() -> None:
    card = {"device": "NVIDIA H100 80GB HBM3", "details": {"log_lines": ["attention: flash_attention_4"]}}
    lines = [
        line("ftcli", 90.0, "bf16", **MEASURED),
        line("ftcli", 60.0, "bf16", **MEASURED, **card),
        line("ftcli", 70.0, "bf16", **MEASURED),
    ]
    rows = [(row[cell_tables.SPEEDS[0]], row["GPU"], row["flash-attn 4"]) for row in rows_of_table(lines)]
    assert rows == [("70", "H200", "no"), ("60", "H100", "yes")]


def test_table_without_a_reference_has_the_distance_from_the_other_program() -> None:
    far = {"losses": [4.0, 2.002], "grad norms": [1.0, 1.01]}
    lines = [
        line("ftcli", 90.0, "bf16", label="long", steps=30, **MEASURED),
        line("ftcli", 80.0, "bf16", **MEASURED),
        line("unsloth", 70.0, "bf16", **MEASURED | far),
        line("trl-default", 60.0, "bf16", **MEASURED | far),
    ]
    assert [row["curve"] for row in rows_of_table(lines[:3])] == [
        "-",
        "1e-03, 1e-02 from unsloth",
        "1e-03, 1e-02 from ftcli",
    ]
    assert [row["curve"] for row in rows_of_table(lines[1:2] + lines[3:])] == ["-", "-"]
    lines[2]["losses"] = [4.0, 3.0]
    assert rows_of_table(lines)[1]["curve"] == "3e-01, 1e-02 from unsloth **differs**"


def test_summary_returns_the_fastest_counted_line_of_a_cell_and_device() -> None:
    card = {"device": "NVIDIA H100 80GB HBM3", "time": 86400.0}
    lines = [
        line("trl", 500.0, **MEASURED),
        line("ftcli", 100.0, label="no extras", agrees=True, **MEASURED),
        line("ftcli", 120.0, label="extras", agrees=True, **MEASURED),
        line("ftcli", 200.0, label="fp8", settings=["precision=fp8"], agrees=True, **MEASURED),
        line("ftcli", 210.0, label="extras", without="compiled-loss", agrees=True, **MEASURED),
        line("ftcli", 300.0, label="wrong", agrees=False, **MEASURED),
        line("ftcli", 400.0, label="slow machine", agrees=True, spoiled="another machine", **MEASURED),
        line("ftcli", 130.0, label="extras", agrees=True, **MEASURED | card),
    ]
    head, _, *rows, _ = cell_tables.summary(cell_tables.cells_of(lines))
    assert head.endswith("| GiB | first step, s | day |") and head.count("|") == rows[0].count("|")
    title = "llama-3.2-1b x4096, pretrain, bf16_pure, single x1, micro size 4"
    assert rows == [
        f"| {title} | H200 | no | extras | 120 | 50.0 % | 250 | 2.0 | 3 | 1970-01-01 |",
        f"| {title} | H100 | no | extras | 130 | 50.0 % | 250 | 2.0 | 3 | 1970-01-02 |",
    ]


@pytest.mark.parametrize(
    ("task", "length", "rows"), [("pretrain", 4096, 1), ("pretrain", 512, 0), ("text_classification", 128, 1)]
)
def test_summary_leaves_out_language_models_with_rows_that_the_host_limits(task: str, length: int, rows: int) -> None:
    one = line("ftcli", 100.0, label="extras", agrees=True, **MEASURED) | {"task": task, "length": length}
    assert len(cell_tables.summary([[one]])) == 3 + rows


def test_cells_of_with_two_learning_rates_returns_the_newest_cell() -> None:
    old, *new = (line("trl", 90.0), line("trl", 80.0), line("ftcli", 95.0))
    old["cell"] = old["cell"] | {"learning_rate": 2e-5}
    assert cell_tables.cells_of([old, *new]) == [new]
    assert cell_tables.cells_of([old]) == [[old]]


def test_cells_of_with_a_long_run_returns_a_cell_of_its_own() -> None:
    short, long = line("trl", 90.0), line("trl", 80.0, steps=200)
    assert cell_tables.cells_of([short, long]) == [[short], [long]]
    assert cell_tables.title_of(long) == f"{cell_tables.title_of(short)}, 200 steps"


def test_replace_writes_between_the_marks(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{cell_tables.BEGIN}\nold\n{cell_tables.END}\nafter\n")
    cell_tables.replace(readme, "new")
    assert readme.read_text() == f"before\n{cell_tables.BEGIN}\nnew\n{cell_tables.END}\nafter\n"
    readme.write_text("no marks")
    with pytest.raises(SystemExit, match="lacks the marks"):
        cell_tables.replace(readme, "new")


def test_log_of_reads_old_and_new_names() -> None:
    old, new = {"told": {"facts": ["a", "b"]}}, {"details": {"log_lines": ["a", "b"]}}
    assert curves.log_of(old) == curves.log_of(new) == "a b"


def patch_line(**fields: object) -> dict[str, object]:
    cell = {"shape": "tiny", "profile": "fsdp"}
    line = {"cell": cell, "peer": "ftcli", "label": cell_tables.PATCHES, "settings": [], "steps": 8, "device": "GPU"}
    line |= {"shape": "tiny", "length": 8, "task": "sft", "lora": 0, "precision": "bf16", "profile": "fsdp"}
    line |= {"processes": 2, "micro_size": 1, "accumulation": 1, "time": 0.0, "losses": [2.0], "without": ""}
    line |= {"traced": 0, "versions": {"commit": "abc"}}
    return line | {"step p50": 0.1, "peak allocated GiB": 3.0} | fields


def test_patches_are_compared_with_the_nearest_line_that_has_all_of_them() -> None:
    lines = [
        patch_line(),
        patch_line(time=9.0, **{"step p50": 0.2}),
        patch_line(time=8.0, without="liger-rotary", losses=[2.2], **{"step p50": 0.25, "peak allocated GiB": 4.0}),
        patch_line(time=8.0, without="other-settings", settings=["a=b"]),
    ]
    (row,) = cell_tables.patches(lines)[4:-1]
    assert "`liger-rotary`" in row
    assert "| 250.0 | 200.0 | 4.0 | 3.0 | 1e-01 |" in row


def test_patches_are_compared_with_a_line_of_another_label_if_their_own_has_none() -> None:
    left_out = patch_line(time=8.0, without="liger-rotary")
    other = patch_line(time=9.0, label="extras", **{"step p50": 0.2})
    (row,) = cell_tables.patches([left_out, other])[4:-1]
    assert "| 100.0 | 200.0 |" in row
    (row,) = cell_tables.patches([left_out, other, patch_line(time=1.0, **{"step p50": 0.3})])[4:-1]
    assert "| 100.0 | 300.0 |" in row


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"device": "other GPU"},
        {"time": 900.0},
        {"versions": {"commit": "def"}},
        {"settings": ["a=b"]},
        {"traced": 3},
        {"spoiled": "other cells ran at the same time"},
        {"without": "other-patch"},
    ],
)
def test_patches_are_not_compared_with_a_line_of_another_run_or_device(fields: dict[str, object]) -> None:
    rows = cell_tables.patches([patch_line(without="liger-rotary"), patch_line(label="extras", **fields)])
    assert len(rows[4:-1]) == (0 if fields else 1)


def test_patches_without_a_base_have_no_table() -> None:
    assert cell_tables.patches([patch_line(without="liger-rotary")]) == []
