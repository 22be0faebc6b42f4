"""Runs whose recipe names a repository, through the real command line and the real client; the hub is on this machine.

Three launches of one run: the first stops while the hub refuses uploads, the second stops again, the third is done.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
from safetensors.torch import load

from ftcli import testing

from ..support.model_hub import TOKEN, ModelHub, receiving

ROOT = Path(__file__).resolve().parents[2]
RECIPE = {
    "task": "./waiting.py",
    "model": {"name": "model", "dropout": 0.0},
    "data": {"train": "words.jsonl", "max_length": 64},
    "batch": {"global_size": 4, "micro_size": 4},
    "train": {"max_steps": 6},
    "optimizer": {"learning_rate": 1e-3},
    "checkpoint": {"every_steps": 4},
    "hub": {"push": "model", "push_at": "checkpoint", "private": True},
}
# WAIT_FOR: for each call of loss, the number of commits that it waits for. STOP_AT: the call that stops the run.
TASK = """
import json, os, signal, time
from pathlib import Path
from ftcli.tasks import pretrain
Options = pretrain.Options
class Task(pretrain.Task):
    calls = 0
    def loss(self, model, batch):
        self.calls += 1
        count = json.loads(os.environ.get("WAIT_FOR", "{}")).get(str(self.calls), 0)
        while count and not Path(f"commit-{count}").exists():
            time.sleep(0.1)
        if str(self.calls) == os.environ.get("STOP_AT") and os.environ.get("RANK", "0") == "0":
            os.kill(int(os.environ.get("FTCLI_PARENT", os.getpid())), signal.SIGTERM)
            if "FTCLI_PARENT" in os.environ:
                while not Path("runs/recipe/stop").exists():
                    time.sleep(0.05)
                time.sleep(0.6)  # the file is read twice a second
        return super().loss(model, batch)
"""


def train(hub: ModelHub, folder: Path, *options: str, **variables: str) -> tuple[int, str]:
    """Return exit code and output of a launch that takes `hub` for the hub."""
    line = [sys.executable, "-m", "ftcli", "train", "recipe.json", "--cpu", "--resume", "auto", "--trust-remote-code"]
    environment = os.environ | hub.environment(str(folder / "home")) | variables | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([*line, *options], cwd=folder, env=environment, capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


@contextmanager
def noting_commits(hub: ModelHub, folder: Path) -> Iterator[None]:
    """Write the file commit-N into `folder` after the hub has received N commits, while the block runs."""
    ended = Event()

    def note() -> None:
        while not ended.wait(0.1):
            for repository in hub.repositories.values():
                (folder / f"commit-{len(repository.commits)}").touch()

    thread = Thread(target=note)
    thread.start()
    yield
    ended.set()
    thread.join()


@pytest.fixture(scope="module")
def hub() -> Iterator[ModelHub]:
    with receiving() as hub:
        yield hub


@pytest.fixture(scope="module")
def launches(hub: ModelHub, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, str]]]:
    """Return the folder, and exit code and output of each launch."""
    folder = tmp_path_factory.mktemp("pushes")
    testing.save_tiny_causal(folder / "model")
    (folder / "waiting.py").write_text(TASK)
    (folder / "words.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(40)))
    (folder / "recipe.json").write_text(json.dumps(RECIPE))
    hub.refused, hub.message = "/commit/", f"no space left for {TOKEN}"
    first = train(hub, folder, STOP_AT="3")
    hub.refused = ""
    with noting_commits(hub, folder):
        two = ("--profile", "ddp", "--num-processes", "2")
        second = train(hub, folder, *two, WAIT_FOR='{"1": 1, "2": 2}', STOP_AT="2")
    return folder, [first, second, train(hub, folder)]


def test_pushed_adapter_of_a_local_base_names_it_as_the_recipe_does(hub: ModelHub, tmp_path: Path) -> None:
    testing.save_tiny_causal(tmp_path / "model")
    (tmp_path / "words.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(8)))
    sections = {"task": "pretrain", "train": {"max_steps": 1}, "adapter": {"type": "lora", "r": 2}}
    recipe = {name: section for name, section in (RECIPE | sections).items() if name not in ("hub", "checkpoint")}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    code, output = train(hub, tmp_path)
    assert code == 0, output
    line = [sys.executable, "-m", "ftcli", "export", "runs/recipe", "kept", "--push", "somebody/adapter"]
    environment = os.environ | hub.environment(str(tmp_path / "home")) | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "warning: the base of the adapter is the local folder model, so others cannot load it" in ended.stderr
    files = hub.repositories["somebody/adapter"].files
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "./model"
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]
    kept = json.loads((tmp_path / "kept" / "adapter_config.json").read_text())
    assert kept["base_model_name_or_path"] == str(tmp_path / "model")


@pytest.mark.slow
def test_runs_with_uploads_at_checkpoints_upload_each_checkpoint_the_last_of_a_stop_and_the_final_weights(
    launches: tuple[Path, list[tuple[int, str]]], hub: ModelHub
) -> None:
    folder, ended = launches
    assert [code for code, _ in ended] == [75, 75, 0], ended
    repository = hub.repositories["somebody/model"]
    commits = list(
        dict.fromkeys(repository.commits)
    )  # the third launch may upload the checkpoint that it resumes once more
    steps = [f"Weights of step-00000{step} of recipe, by ftcli" for step in (3, 4, 5)]
    assert commits == [*steps, "Final weights of recipe, by ftcli"]
    assert "hub.push: runs/recipe/checkpoints/step-000005 is uploaded: http://127.0.0.1" in ended[1][1]
    assert "hub.push: runs/recipe is uploaded: http://127.0.0.1" in ended[2][1]
    final = (folder / "runs" / "recipe" / "final" / "model.safetensors").read_bytes()
    assert repository.private and load(repository.files["model.safetensors"]).keys() == load(final).keys()
    for name, weights in load(final).items():
        assert weights.equal(load(repository.files["model.safetensors"])[name])
    assert "README.md" in repository.files and "config.json" in repository.files


@pytest.mark.slow
def test_run_with_a_refused_upload_logs_one_line_and_keeps_its_exit_code(
    launches: tuple[Path, list[tuple[int, str]]],
) -> None:
    code, text = launches[1][0]
    lines = [line for line in text.splitlines() if "upload" in line]
    assert code == 75 and len(lines) == 1, text
    assert lines[0].startswith("ftcli: hub.push: runs/recipe/checkpoints/step-000003 was not uploaded (")
    assert "the hub answered 500: no space left for" in lines[0]
    repeat = "`ftcli export runs/recipe/checkpoints/step-000003 --push somebody/model --private --trust-remote-code`"
    assert lines[0].endswith(f"repeat it with {repeat}")


@pytest.mark.slow
def test_run_with_uploads_writes_the_token_nowhere(launches: tuple[Path, list[tuple[int, str]]], hub: ModelHub) -> None:
    folder, ended = launches
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert (folder / "runs" / "recipe" / "environment.json") in files
    uploaded = hub.repositories["somebody/model"].files
    texts = [text.encode() for _, text in ended] + [path.read_bytes() for path in files] + list(uploaded.values())
    assert not [text for text in texts if TOKEN.encode() in text]
