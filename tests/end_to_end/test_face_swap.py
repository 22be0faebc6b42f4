"""A generator of fused faces from training to the plain network: drawings, checkpoints, resuming, export."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import ftcli
from ftcli.checkpoint.export import export
from ftcli.checkpoint.final import PROBE
from ftcli.checkpoint.folder import read_state
from ftcli.config.recipe import Recipe
from ftcli.launch.worker import evaluate_run, work
from ftcli.runtime.checkpoint_names import checkpoint_path
from ftcli.runtime.errors import InputError
from ftcli.runtime.run_folder import RunFolder
from ftcli.tasks.shared.images import load_image, read_size
from ftcli.training import setup

from ..support.cells import STEPS, cell
from ..support.runner import MakeInputs

# Runs in a process that cannot import ftcli, with the exported folder and a probe.
PLAIN = """
import sys
sys.modules["ftcli"] = None
folder, probe, *faces = sys.argv[1:]
sys.path.insert(0, folder)
import generator, torch
from safetensors.torch import load_file
inputs = load_file(probe)
expected = inputs.pop("logits")
with torch.no_grad():
    image = generator.load(folder)(**inputs)
print(float((image - expected).abs().max()))
generator.main(*faces)
"""


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    """Return a folder of this module's own, because a test changes a helper network in it."""
    return make_inputs()


@pytest.fixture(scope="module")
def recipe(inputs: Path) -> Recipe:
    options = cell(inputs, "faces").task_options | {"perceptual": str(inputs / "mobilenet")}  # it has buffers
    sections = {"checkpoint": {"every_steps": 2, "keep": None}, "evaluate": {"every_steps": 2}}
    return cell(inputs, "faces", task_options=options, **sections)


@pytest.fixture(scope="module")
def run(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "faces"
    work(recipe, None, output=folder, cpu=True)
    return folder


def test_every_term_has_its_own_line_in_the_metrics(run: Path) -> None:
    terms = {"identity", "reconstruction", "perceptual", "attributes"}
    for row in RunFolder(run).metrics():
        if "loss" in row:
            means = {name: row[f"train/{name}"] for name in terms}
            weights = {"identity": 10, "reconstruction": 10, "perceptual": 1, "attributes": 10}
            assert row["loss"] == pytest.approx(sum(weights[name] * means[name] for name in terms), rel=1e-5)
        else:
            assert set(row) == {"step", *(f"eval/{name}" for name in (*terms, "similarity", "likeness", "between"))}


def test_evaluations_draw_a_sheet_of_source_target_and_fused_face(run: Path, recipe: Recipe) -> None:
    assert {path.name for path in (run / "drawings").iterdir()} == {"step-000002-faces.png", "step-000004-faces.png"}
    metrics = evaluate_run(run, cpu=True)
    last = {name.removeprefix("eval/"): value for name, value in RunFolder(run).metrics()[-1].items()}
    assert metrics == pytest.approx({name: last[name] for name in metrics}, rel=1e-5)
    content = (run / "drawings" / "final-faces.png").read_bytes()
    assert content == (run / "drawings" / "step-000004-faces.png").read_bytes()
    sheet = load_image(None, content)
    # Five evaluation rows of three images, each enlarged eight times to 128 pixels.
    assert sheet.size == (6 + 3 * 134, 18 + 6 + 5 * 152)
    prepared = ftcli.prepare(recipe, cpu=True)
    task: Any = prepared.task
    assert prepared.rows.eval is not None
    target = task._pixels(prepared.rows.eval[0])[:, 3, 5] * 255
    assert sheet.getpixel((6 + 134 + 5 * 8 + 4, 18 + 3 * 8 + 4)) == tuple(target.round().int().tolist())


def names_in(files: list[Path]) -> set[str]:
    return {name for path in files for name in safe_open(path, framework="pt").keys()}  # noqa: SIM118 - no mapping


def test_checkpoints_and_final_weights_have_no_helper_network(run: Path) -> None:
    checkpoint = checkpoint_path(run, 4)
    state = read_state(checkpoint)
    assert state["buffers"] == [] and all(name.startswith("generator.") for name in state["parameters"])
    stored = names_in([checkpoint / name for name in state["files"]])
    assert stored and all(name.partition("/")[2].startswith("generator.") for name in stored)
    final = names_in([run / "final" / "model.safetensors"])
    assert final == {name.removeprefix("generator.") for name in state["parameters"]}
    assert {path.name for path in (run / "final").iterdir()} == {
        "README.md",
        "config.json",
        "generator.py",
        "model.safetensors",
    }


def test_export_is_the_generator_alone_and_equal_in_plain_torch(run: Path, tmp_path: Path, inputs: Path) -> None:
    final = load_file(run / "final" / "model.safetensors")
    for source, name in ((run, "a"), (checkpoint_path(run, 4), "b")):
        folder = export(source, tmp_path / name)
        weights = load_file(folder / "model.safetensors")
        assert weights.keys() == final.keys() and all(torch.equal(weights[key], final[key]) for key in final)
    faces = [inputs / "faces" / f"person-{n}" / "0.png" for n in (0, 1)]
    command = [sys.executable, "-c", PLAIN, folder, run / PROBE, *faces, tmp_path / "fused.png"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-6
    assert read_size(str(tmp_path / "fused.png"), None) == (16, 16, "RGB")


def test_run_resumes_bit_for_bit_and_continues_from_an_exported_generator(run: Path, recipe: Recipe) -> None:
    before = [row["loss"] for row in RunFolder(run).training_rows()]
    resumed = ftcli.prepare(recipe, cpu=True, resume=checkpoint_path(run, 2))
    assert [step.loss for step in ftcli.steps(resumed)] == before[2:]
    further = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": str(run / "final")})})
    continued: Any = ftcli.prepare(further, cpu=True).model
    assert torch.equal(continued.generator.output.bias, load_file(run / "final" / "model.safetensors")["output.bias"])
    other = further.model_copy(update={"task_options": recipe.task_options | {"channels": 16}})
    with pytest.raises(InputError, match="(?s)has channels 8, and the recipe 16.*set task_options.channels to 8"):
        ftcli.prepare(other, cpu=True)


def test_resume_with_another_helper_network_is_refused(run: Path, recipe: Recipe, inputs: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = inputs / "mobilenet" / "model.safetensors"
    shutil.copy(file, tmp_path)
    weights = load_file(file)
    name = next(name for name, value in weights.items() if value.ndim == 4)
    (tmp_path / "mine.py").write_text("from ftcli.tasks.face_swap import Options, Task as Task\n")
    later = recipe.model_copy(update={"task": str(tmp_path / "mine.py")})  # its helpers are known when it is imported
    begun = ftcli.prepare(recipe, cpu=True, output=tmp_path / "begun")
    save_file(weights | {name: weights[name] * 2}, file, metadata={"format": "pt"})
    try:
        step = next(ftcli.steps(begun))
        ftcli.save_checkpoint(begun, step.number)  # with the networks that were loaded, not those of the files now
        with pytest.raises(
            InputError,
            match=r"the frozen weights of task_options.perceptual: \S+mobilenet are not those with which the model",
        ):
            ftcli.prepare(recipe, cpu=True, resume=checkpoint_path(run, 2))
        with pytest.raises(InputError, match="the frozen weights of task_options.perceptual"):
            setup.prepare(later, cpu=True, resume=checkpoint_path(run, 2))
        assert ftcli.prepare(recipe, cpu=True, resume=checkpoint_path(run, 2), resume_anyway=True).first_step == 2
    finally:
        shutil.copy(tmp_path / file.name, file)
    first, second = (read_state(checkpoint_path(folder, n)) for folder, n in ((tmp_path / "begun", 1), (run, 2)))
    assert first["helpers"] == second["helpers"] and list(first["helpers"]) == ["task_options.perceptual"]


def test_card_of_the_generator_says_what_it_is(run: Path) -> None:
    card = (run / "final" / "README.md").read_text()
    assert "pipeline_tag: image-to-image" in card and f"| identity | {last(run)['eval/identity']:.4f} |" in card
    assert json.loads((run / "final" / "config.json").read_text())["model_type"] == "swap_generator"
    assert len(RunFolder(run).training_rows()) == STEPS


def last(run: Path) -> dict[str, float]:
    return RunFolder(run).metrics()[-1]
