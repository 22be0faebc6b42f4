"""Scripts that train: that they fit the current ftcli, on a CPU with tiny models, and measure what they name."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import run_on_cpu

BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")
SHORT = 4  # steps of a block


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["pytest"])


def test_chains_have_all_settings_of_the_recipes_of_other_scripts(tmp_path: Path) -> None:
    import resume_chains

    parsed = resume_chains.options().parse_args([str(tmp_path), "--shape", "tiny"])
    assert resume_chains.write_inputs(tmp_path, "lora", parsed).exists()


def test_loops_of_two_runs_alternate_and_have_the_same_losses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import loop_overhead

    monkeypatch.setattr(sys, "argv", ["loop_overhead.py", *["--steps", "4", "--block", "2", "--warm", "1", "--cpu"]])
    loop_overhead.main()
    losses = json.loads(capsys.readouterr().out.splitlines()[-1])["losses"]
    assert losses["ours"] == losses["recorded"] == pytest.approx(losses["bare"], rel=1e-5)


def messages_of_blocks(recipe: str) -> tuple[dict[str, int], int]:
    """Return the number of blocks of each kind, and how many messages ftcli sent in all of them."""
    sys.path.insert(0, BENCHMARKS)
    import control_message

    from ftcli.hardware.collectives import Ranks

    sender, sent = Ranks.sum_later, []

    def counted(ranks: Ranks, values: list[int]) -> Any:
        sent.append(values)
        return sender(ranks, values)

    Ranks.sum_later = counted  # type: ignore[method-assign]
    control_message.BLOCK = SHORT
    times = control_message.measure(recipe, SHORT, cpu=True)
    return {kind: len(blocks) for kind, blocks in times.items()}, len(sent)


def test_blocks_named_none_send_no_message(tmp_path: Path) -> None:
    from loop_overhead import write_inputs

    recipe = str(write_inputs(tmp_path, "tiny", 32, 2))
    for blocks, sent in run_on_cpu(messages_of_blocks, recipe):
        assert blocks == {"none": 1, "ours": 1, "device": 1}
        assert sent == SHORT


def test_pauses_and_resumptions_are_measured(tmp_path: Path) -> None:
    import checkpoint_matrix
    import checkpoint_pause
    from loop_overhead import write_inputs

    recipe = str(write_inputs(tmp_path, "tiny", 32, 1))
    pauses = checkpoint_pause.measure(recipe, str(tmp_path / "pauses"), 2, 1, cpu=True)
    assert [len(pauses[way]["pause"]) for way in checkpoint_pause.WAYS] == [2, 2]
    overrides = ["train.max_steps=4", "checkpoint.keep=null"]
    saved = checkpoint_matrix.train_and_save(recipe, str(tmp_path / "run"), overrides, 2, cpu=True)
    checkpoint = str(tmp_path / "run" / "checkpoints" / "step-000002")
    resumed = checkpoint_matrix.resume(recipe, checkpoint, overrides, cpu=True)
    assert resumed["losses"] == pytest.approx(saved["losses"][2:], rel=1e-6)


def test_layouts_are_compared_where_the_recipe_leaves_the_micro_size_to_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import packed_against_padded
    from loop_overhead import write_inputs

    recipe = str(write_inputs(tmp_path, "tiny", 32, 2))
    options = "--cpu --documents 8 --steps 2 --capacity 64 --set batch.micro_size=auto"
    monkeypatch.setattr(sys, "argv", ["packed_against_padded.py", recipe, *options.split()])
    with pytest.raises(SystemExit) as ended:
        packed_against_padded.main()
    assert not ended.value.code


def test_rows_of_the_host_benchmark_give_all_weights_gradients(tmp_path: Path) -> None:
    from zero3_host_time import write_inputs

    import ftcli

    run = ftcli.prepare(str(write_inputs(tmp_path, 2)), cpu=True)
    loop = ftcli.steps(run)
    losses = [next(loop).loss for _ in range(21)]  # tensors without gradient would stop it after step 20
    assert losses[-1] < losses[0]


def test_tests_that_a_script_selects_by_words_exist() -> None:
    script = (Path(BENCHMARKS) / "gpu_data.sh").read_text()
    found = re.findall(r'(tests/gpu/\w+\.py) -k (?:"([^"]+)"|(\w+))', script)
    assert len(found) == script.count(" -k ")
    for file, words, word in found:
        names = re.findall(r"def (test_\w+)", text := (Path(BENCHMARKS).parent / file).read_text())
        first, *rest = reversed((words or word).split(" and "))  # of a name, of its parameters
        assert any(f"_{first}_" in name for name in names), f"{file} has no test named {first}"
        assert all(f'"{each}"' in text for each in rest)


def test_cells_of_the_speed_script_set_no_key_twice(tmp_path: Path) -> None:
    script = Path(BENCHMARKS) / "gpu_speed.sh"
    groups = re.findall(r"^(\w+)\(\) \{ *(?:#.*)?$", script.read_text().partition("has() {")[2], re.MULTILINE)
    line = ["bash", str(script), str(tmp_path / "work"), str(tmp_path / "results"), "0", *groups]  # no cell starts
    given = os.environ | {"TMPDIR": str(tmp_path), "GPUS": "8", "EXTRAS": str(tmp_path)}
    subprocess.run(line, env=given, check=False, capture_output=True)  # 1 without results
    cells = [shlex.split(text) for lane in tmp_path.glob("tmp.*/*") for text in lane.read_text().splitlines()]
    assert len(cells) > 200
    for name, *words in cells:
        keys = [word.partition("=")[0] for option, word in pairwise(words) if option == "--set"]
        assert len(keys) == len(set(keys)), f"{name}: {keys}"
