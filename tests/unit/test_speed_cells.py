"""The speed tables: what a token costs by hand, whose rows a rank trains, when a curve agrees, when a goal counts."""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import cell_tables  # noqa: E402
from cells import curves, flops, goals  # noqa: E402
from cells.cell import Cell  # noqa: E402
from cells.rows import Documents, PackedRows, as_row, draw_documents  # noqa: E402

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


def test_a_looked_up_embedding_costs_nothing_and_a_tied_one_is_the_head(tmp_path: Path) -> None:
    save_header(tmp_path, {"model.embed_tokens.weight": [10, 8], "model.layers.0.q_proj.weight": [12, 8]})
    assert flops.multiplied(flops.weights_of(tmp_path)) == 80 + 96
    shapes = {"model.embed_tokens.weight": [10, 8], "lm_head.weight": [10, 8], "model.norm.weight": [8]}
    save_header(tmp_path, shapes)
    assert flops.multiplied(flops.weights_of(tmp_path)) == 80 + 8


def test_the_patches_of_an_image_are_multiplied_and_positions_and_words_are_not() -> None:
    weights = {
        "vit.embeddings.patch_embeddings.projection.weight": 5,
        "vit.embeddings.position_embeddings": 7,
        "bert.embeddings.word_embeddings.weight": 11,
        "classifier.weight": 2,
    }
    assert flops.multiplied(weights) == 5 + 2


def test_flops_are_six_for_a_weight_and_twelve_for_each_pair_of_a_documents_tokens(tmp_path: Path) -> None:
    save_header(tmp_path, {"model.embed_tokens.weight": [10, 8]})
    squares = 3 * 3 + 4 * 4
    assert flops.flops(tmp_path, 7, squares) == 6 * 80 * 7 + 12 * 2 * 4 * 3 * squares


def test_frozen_weights_have_no_gradient_of_their_own(tmp_path: Path) -> None:
    save_header(tmp_path, {"model.embed_tokens.weight": [10, 8]})
    queries, keys = 12, 6
    adapter = 2 * 5 * (2 * (8 + queries) + 2 * (8 + keys) + 3 * (8 + 16))
    assert flops.flops(tmp_path, 7, 0, lora=5) == (4 * 80 + 6 * adapter) * 7


def documents(lengths: list[int]) -> Documents:
    ids = np.arange(10, 10 + sum(lengths), dtype=np.int32)
    return Documents(ids, np.ones(len(ids), dtype=bool), np.array(lengths))


def test_a_documents_first_token_is_predicted_by_nothing() -> None:
    held = documents([2, 3])
    assert held.positions.tolist() == [0, 1, 0, 1, 2]
    assert held.labels.tolist() == [-100, 11, -100, 13, 14]
    assert held.items == 3


def test_ranks_take_turns_at_the_micro_batches_of_a_step(tmp_path: Path) -> None:
    held = documents([1] * 16)
    path = tmp_path / "rows.npz"
    empty = np.array([], dtype=np.uint64)
    np.savez(
        path, ids=held.ids, trained=held.trained, lengths=held.lengths, documents=np.array([2] * 8), digests=empty,
        targets=empty, paths=empty,
    )  # fmt: skip
    rows = PackedRows(path, global_size=4)
    assert len(rows) == 8
    assert rows.step(1).ids.tolist() == list(range(18, 26))
    taken = [rows.micro_batches(1, micro_size=1, rank=rank, processes=2) for rank in (0, 1)]
    assert [[part.ids.tolist() for part in parts] for parts in taken] == [
        [[18, 19], [22, 23]],
        [[20, 21], [24, 25]],
    ]


def test_documents_fill_the_rows_of_all_steps_and_are_the_same_each_time() -> None:
    cell = Cell(peer="bare", shape="tiny", length=64, micro_size=2, steps=10)
    drawn = draw_documents(cell, 512)
    assert sum(len(words) + 1 for words in drawn) >= 2 * 10 * 64
    assert max(len(words) for words in drawn) == 63
    assert [words.tolist() for words in drawn] == [words.tolist() for words in draw_documents(cell, 512)]


def test_a_row_has_the_form_of_its_task() -> None:
    assert as_row([5, 6, 7], "pretrain") == {"text": "5 6 7"}
    assert as_row([5, 6, 7], "sft") == {"prompt": "5 ", "completion": "6 7"}
    assert as_row([5, 6], "text_classification") == {"text": "5 6", "label": "odd"}


def line(peer: str, speed: float, precision: str = "bf16_pure", **fields: object) -> dict:
    cell = Cell(peer=peer, shape="llama-3.2-1b", length=4096, micro_size=4, task="pretrain", precision=precision)
    found = vars(cell) | {"cell": cell.key, goals.SPEED: speed, "losses": [4.0, 2.0], "grad norms": [1.0, 1.0]}
    return found | {"time": 0.0} | fields


def test_a_curve_agrees_within_two_hundredths_of_the_loss_and_five_of_the_norm() -> None:
    masters = line("bare", 1.0, "bf16")
    assert curves.compare(masters, [masters]) == {}
    near = line("ftcli", 1.0, "bf16", losses=[4.0, 2.03], **{"grad norms": [1.0, 1.04]})
    found = curves.compare(near, [masters])
    assert found["agrees"] and found["apart"] == pytest.approx({"losses": 0.015, "grad norms": 0.04})
    assert not curves.compare(line("ftcli", 1.0, "bf16", losses=[4.0, 2.05]), [masters])["agrees"]
    assert not curves.compare(line("ftcli", 1.0, "bf16", **{"grad norms": [1.0, float("nan")]}), [masters])["agrees"]


def test_weights_in_bfloat16_alone_must_follow_the_curve_of_float32_ones() -> None:
    masters, rounded = line("bare", 1.0, "bf16"), line("bare", 1.0, losses=[4.0, 3.0])
    for lines in ([masters, rounded], [rounded, masters]):
        found = curves.judged([*lines, line("ftcli", 1.0, agrees=False)])
        assert [one.get("agrees") for one in found if one["peer"] == "ftcli"] == [True]
        assert [one.get("agrees") for one in found if one["precision"] == "bf16_pure"] == [False, True]


def test_shards_of_deepspeed_must_follow_the_curve_of_fsdp_not_that_of_stock_bf16() -> None:
    found = {}
    for profile, losses in (("fsdp", [4.0, 2.0]), ("zero3", [4.0, 3.0])):
        found[profile] = line("bare", 1.0, "bf16", losses=losses)
        found[profile]["cell"] = found[profile]["cell"] | {"profile": profile}
    ours = line("ftcli", 1.0, "bf16") | {"cell": found["zero3"]["cell"]}
    for lines, agree in (([found["fsdp"], found["zero3"]], [None, False, True]), ([found["zero3"]], [None, False])):
        assert [one.get("agrees") for one in curves.judged([*lines, ours])] == agree


def test_the_bare_loop_with_another_kernel_is_the_reference_where_it_is_alone() -> None:
    flash, ours = line("bare", 1.0, "bf16", settings=["attn_implementation=x"]), line("ftcli", 1.0, "bf16")
    assert [one.get("agrees") for one in curves.judged([flash, ours])] == [None, True]
    assert [one.get("agrees") for one in curves.judged([flash, line("bare", 1.0, "bf16"), ours])] == [True, None, True]


def test_a_line_of_another_cell_is_no_reference() -> None:
    other = line("bare", 1.0, "bf16")
    assert curves.compare(line("ftcli", 1.0), [other | {"cell": other["cell"] | {"length": 8192}}]) == {}


def told(lines: list[dict], what: str) -> tuple[float | None, str]:
    return next((ratio, said) for goal, ratio, said in goals.judge(lines) if goal.what == what)


def test_a_goal_counts_only_when_our_curve_is_the_reference_s() -> None:
    what = "1B bf16_pure, of TRL at its best"
    trl = line("trl", 100.0, agrees=True)
    ours = line("ftcli", 120.0, label="extras", agrees=True)
    assert told([trl], what) == (None, "not measured: ftcli")
    assert told([trl, ours], what) == (1.2, "reached")
    assert told([trl, ours | {goals.SPEED: 110.0}], what) == (pytest.approx(1.1), "missed")
    assert told([trl | {"agrees": False}, ours], what)[1] == "reached; the curve of the other leaves the reference"
    assert told([trl, ours | {"agrees": False}], what)[1] == "does not count: our curve leaves the reference"
    for lines in ([trl | {"spoiled": "it rained"}, ours], [trl, ours | {"spoiled": "it rained"}]):
        assert told(lines, what)[1] == "does not count: it rained"
    del ours["agrees"]
    assert told([trl, ours], what)[1] == "does not count: no reference was measured"


def test_a_goal_is_a_ratio_of_one_run_where_one_measured_both() -> None:
    what, later = "1B bf16_pure, of TRL at its best", 10 * goals.RUN
    trl, ours = line("trl", 100.0), line("ftcli", 120.0, label="extras", agrees=True, time=60.0)
    faster = line("ftcli", 130.0, label="extras", agrees=True, time=later)
    assert told([trl, ours, faster], what) == told([faster, ours, trl], what) == (1.2, "reached")
    assert told([trl, ours, faster, trl | {"time": later + 60.0}], what) == (1.3, "reached")
    assert told([trl, faster], what) == (1.3, "reached; not of one run")


def test_lines_of_the_ladder_or_under_a_profiler_reach_no_goal() -> None:
    what = "1B bf16_pure, of TRL at its best"
    slow = line("ftcli", 90.0, label="extras", agrees=True)
    switched = line("ftcli", 200.0, label="ladder", settings=["log.every_steps=1"])
    traced = line("ftcli", 300.0, label="extras", traced=3)
    assert told([line("trl", 100.0), slow, switched, traced], what) == (0.9, "missed")


def test_a_rung_of_the_ladder_stands_beside_the_plain_line() -> None:
    memory = {"peak allocated GiB": 2.0}
    plain = line("ftcli", 100.0, label="no extras", **memory)
    rung = line("ftcli", 90.0, label="ladder", settings=["log.every_steps=1"], losses=[4.0, 2.02], **memory)
    rows = cell_tables.ladder(cell_tables.cells_of([plain, rung]))
    assert rows[-2].endswith("| `log.every_steps=1` | -10.0 % | +0.0 | 1e-02 |")


def test_a_cell_that_was_measured_again_at_another_learning_rate_is_shown_once() -> None:
    old, *new = (line("trl", 90.0), line("trl", 80.0), line("ftcli", 95.0))
    old["cell"] = old["cell"] | {"learning_rate": 2e-5}
    assert cell_tables.cells_of([old, *new]) == [new]
    assert cell_tables.cells_of([old]) == [[old]]


def test_tables_take_the_place_between_the_marks(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{cell_tables.BEGIN}\nold\n{cell_tables.END}\nafter\n")
    cell_tables.replace(readme, "new")
    assert readme.read_text() == f"before\n{cell_tables.BEGIN}\nnew\n{cell_tables.END}\nafter\n"
    readme.write_text("no marks")
    with pytest.raises(SystemExit, match="lacks the marks"):
        cell_tables.replace(readme, "new")
