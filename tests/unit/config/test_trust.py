"""A folder of another person runs no code: not its task, its model's code or a kernel, unless the user says so."""

from __future__ import annotations

import ast
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

import ftcli as ftcli_package
from ftcli.__main__ import main
from ftcli.checkpoint.final import load_plain
from ftcli.checkpoint.folder import read_state, update_state
from ftcli.checkpoint.verify import RELOAD
from ftcli.config.load import dump_recipe, load_recipe, load_run_recipe
from ftcli.config.recipe import Recipe
from ftcli.config.trust import check_configs, check_links, check_stored, is_kernel, with_consent
from ftcli.data.revisions import resolve
from ftcli.models.load import READ_WEIGHTS, load_model
from ftcli.runtime.checkpoint_names import checkpoints_of
from ftcli.runtime.environment import describe_environment
from ftcli.runtime.errors import InputError
from ftcli.runtime.run_folder import RunFolder
from ftcli.testing import save_tiny_causal
from ftcli.training.resume import find_start, recipe_changes

from ...support.recipes import minimal_values
from ..checkpoint.test_folder import write

OWN_FOLDERS = ("data/assets/models.py",)  # builds models from files whose digest it knows
FLAG = "--trust-remote-code"
# A task that works, and tells that it was imported.
TASK = """
from pathlib import Path
from ftcli.tasks.sft import Options, Task
Path({marker!r}).touch()
"""
MODELING = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
TOKENIZATION = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({marker!r}).touch()

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
# A task without a method for prompts, which marks its import.
WORDLESS_TASK = """
from pathlib import Path
from ftcli.tasks.sft import Options
Path({marker!r}).touch()

class Task:
    {member}
"""
ROWS = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
Ftcli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_causal(tmp_path_factory.mktemp("model"))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "code-was-run"


@pytest.fixture
def ftcli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ftcli:
    """Return a function that runs one command line in this process and gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return run


def recipe_of(weights: Path, **changes: Any) -> Recipe:
    values: dict[str, Any] = minimal_values(
        model={"name": str(weights), "trust_remote_code": True},
        data={"train": "rows.jsonl", "eval": "rows.jsonl", "max_length": 64},
        batch={"global_size": 2},
        train={"max_steps": 2},
        checkpoint={"every_steps": 1},
    )
    return Recipe.model_validate(values | changes)


def foreign_run(folder: Path, recipe: Recipe, model: Path) -> tuple[Path, Path]:
    """Write a run and one of its checkpoints as another person's ftcli may have: trust is stored as given."""
    run = folder / "foreign"
    run.mkdir()
    (run / "recipe.yaml").write_text(dump_recipe(recipe))
    (run / "final").symlink_to(model)
    more = {
        "steps": 2,
        "optimizer_updates": 1,
        "loss_scale": None,
        "parameters": {},
        "buffers": [],
        "versions": {},
        "written_by": {"profile": "single", "distributed_type": "NO", "processes": 1},
        "data": {"rows": 2, "fingerprint": "abc", "facts": {}},
        "recipe": recipe.model_dump(mode="json"),
    }
    (folder / "rows.jsonl").write_text(ROWS * 4)
    return run, write(run, 1, **more)


@pytest.mark.parametrize("task", ["./foreign_task.py", "foreign_package.task"])
def test_commands_on_a_foreign_folder_run_no_code_that_it_names(
    task: str, tmp_path: Path, model: Path, marker: Path, ftcli: Ftcli
) -> None:
    (tmp_path / "foreign_package").mkdir()
    (tmp_path / "foreign_package" / "__init__.py").write_text("")
    for file in ("foreign_task.py", "foreign_package/task.py"):
        (tmp_path / file).write_text(TASK.format(marker=str(marker)))
    run, checkpoint = foreign_run(tmp_path, recipe_of(model, task=task), model)
    own = recipe_of(model, model={"name": str(model)})
    (tmp_path / "mine.yaml").write_text(dump_recipe(own))
    for target in (run, checkpoint):
        for command in (
            ["generate", target, "--cpu", "--prompt", "a"],
            ["chat", target, "--cpu"],
            ["export", target, "out"],
        ):
            code, _, err = ftcli(*command)
            assert (code, marker.exists()) == (2, False), command
            assert f"{target} names the task {task}" in err and FLAG in err and "Traceback" not in err
        assert ftcli("show", target)[0] == 0
    code, _, err = ftcli("evaluate", run, "--cpu")
    assert code == 2 and FLAG in err
    code, _, err = ftcli("evaluate", run, "--cpu", "--profile", "ddp", "--num-processes", "2")
    assert code == 2 and FLAG in err
    for target in (run, checkpoint):  # its weights are read, its task is compared, and neither is run
        code, _, err = ftcli("train", "mine.yaml", "--cpu", "--output", "mine", "--resume", target)
        assert code == 2 and f"task: '{task}' -> 'sft'" in err
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


def test_generate_of_a_task_without_prompts_is_refused_before_consent_is_checked(
    tmp_path: Path, model: Path, marker: Path, ftcli: Ftcli
) -> None:
    run, checkpoint = foreign_run(tmp_path, recipe_of(model, task="./foreign_task.py"), model)
    for target in (run, checkpoint):
        (tmp_path / "foreign_task.py").write_text(WORDLESS_TASK.format(marker=str(marker), member="item = 'sample'"))
        code, _, err = ftcli("generate", target, "--cpu", "--prompt", "a")
        assert (code, marker.exists()) == (2, False)
        assert f"the model of {target} does not generate text: its task is ./foreign_task.py" in err and FLAG not in err
        member = "def __init__(self, recipe, options): self.encode_prompt = list"
        (tmp_path / "foreign_task.py").write_text(WORDLESS_TASK.format(marker=str(marker), member=member))
        code, _, err = ftcli("generate", target, "--cpu", "--prompt", "a")
        assert (code, marker.exists()) == (2, False) and FLAG in err and "does not generate text" not in err


def test_trust_with_a_foreign_task_runs_with_the_users_word(
    tmp_path: Path, model: Path, marker: Path, ftcli: Ftcli
) -> None:
    (tmp_path / "foreign_task.py").write_text(TASK.format(marker=str(marker)))
    run, _ = foreign_run(tmp_path, recipe_of(model, task="./foreign_task.py"), model)
    code, answer, _ = ftcli("generate", run, "--cpu", "--prompt", "a", "--max-new-tokens", 2, FLAG)
    assert code == 0 and answer and marker.exists()


def test_load_run_recipe_ignores_stored_trust(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = foreign_run(tmp_path, recipe_of(model), model)
    assert load_run_recipe(run).model.trust_remote_code is False
    assert load_run_recipe(run, trust_remote_code=True).model.trust_remote_code is True
    own = recipe_of(model, task="./mine.py")
    assert check_stored(own, run, trusted=True).task == "./mine.py"
    with pytest.raises(InputError, match="has no run"):
        load_run_recipe(tmp_path)
    with pytest.raises(InputError, match="there is no folder"):
        load_run_recipe(tmp_path / "nowhere")
    (checkpoint := tmp_path / "mine" / "checkpoints" / "step-000006").mkdir(parents=True)
    with pytest.raises(InputError, match="it is a checkpoint; export and generate take one, other commands its run"):
        load_run_recipe(checkpoint)
    monkeypatch.chdir(checkpoint.parent)
    with pytest.raises(InputError, match=f"other commands its run {tmp_path / 'mine'}"):
        load_run_recipe("step-000006")


def test_check_stored_stored_kernel_is_downloaded_code(tmp_path: Path, model: Path) -> None:
    recipe = recipe_of(model, model={"name": str(model), "attn_implementation": "someone/kernel"})
    with pytest.raises(InputError, match="names the attention kernel someone/kernel"):
        check_stored(recipe, tmp_path, trusted=False)
    assert check_stored(recipe, tmp_path, trusted=True).model.attn_implementation == "someone/kernel"
    names = ["a/b", "a/b@main:f", "paged|a/b", None, "sdpa", "flash_attention_2"]
    assert [is_kernel(name) for name in names] == [True, True, True, False, False, False]
    config = {"model_type": "llama", "text_config": {"attn_implementation": {"": "someone/kernel"}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=f"{FLAG}") as refused:
        check_configs(tmp_path, trusted=False)
    assert "someone/kernel" in str(refused.value)
    check_configs(tmp_path, trusted=True)


@pytest.fixture
def own_model(tmp_path: Path, model: Path, marker: Path) -> Path:
    """A model whose architecture and tokenizer come as Python code with its weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "own-model"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    (folder / "modeling_own.py").write_text(MODELING.format(marker=str(marker)))
    code = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    config = json.loads((folder / "config.json").read_text())
    changes = {"model_type": "own_llama", "architectures": ["OwnModel"], "auto_map": code}
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "tokenization_own.py").write_text(TOKENIZATION.format(marker=str(marker)))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    code = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    changes = {"tokenizer_class": "OwnTokenizer", "auto_map": code}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | changes))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "adapter", [pytest.param({"type": "none"}, marks=pytest.mark.slow), {"type": "lora", "target_modules": ["q_proj"]}]
)
def test_commands_on_a_run_with_model_code_need_trust_remote_code(
    adapter: dict[str, Any],
    own_model: Path,
    tmp_path: Path,
    marker: Path,
    ftcli: Ftcli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "rows.jsonl").write_text(ROWS * 4)
    trusting = recipe_of(own_model, model={"name": str(own_model), "trust_remote_code": True}, adapter=adapter)
    (tmp_path / "r.yaml").write_text(dump_recipe(trusting))
    assert ftcli("train", "r.yaml", "--cpu", "--output", "run")[0] == 0  # the user's recipe is the user's word
    run, checkpoint = tmp_path / "run", checkpoints_of(tmp_path / "run")[-1]
    assert load_recipe(run / "recipe.yaml").model.trust_remote_code is False
    assert read_state(checkpoint)["recipe"]["model"]["trust_remote_code"] is False
    (tmp_path / "plain.yaml").write_text(dump_recipe(with_consent(trusting, trusted=False)))
    for trust in ("r.yaml", "plain.yaml"):
        assert find_start(RunFolder(run), load_recipe(trust), "auto") == checkpoint
    marker.unlink()
    answer = ["--cpu", "--prompt", "a", "--max-new-tokens", 2]
    commands: list[list[object]] = [["generate", run, *answer], ["generate", checkpoint, *answer]]
    commands += [["export", run, "out-of-run"]]
    if adapter["type"] == "none":
        commands += [["generate", own_model, *answer], ["evaluate", run, "--cpu"], ["export", checkpoint, "out"]]
        commands += [["chat", run, "--cpu"]]
    else:
        commands += [["export", run, "merged", "--merge"]]
    for command in commands:
        code, _, err = ftcli(*command)
        assert code == 2 and "code of its own" in err and FLAG in err and "Traceback" not in err, command
        assert not marker.exists(), command
        names_final = command[1] is run and command[0] != "evaluate"  # with an adapter: for the tokenizer's code
        assert f"{run / 'final' if names_final else own_model} comes with Python code" in err, command
    for command in commands:
        monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))  # the question for chat
        code, out, err = ftcli(*command, FLAG)
        assert (code, bool(out)) == (0, True), err
    code, _, err = ftcli("train", "plain.yaml", "--cpu", "--output", "run", "--resume", "auto", FLAG)
    assert code == 0 and "nothing is left to resume" in err


def test_load_model_without_reading_weights_runs_trusted_code_only(own_model: Path, marker: Path) -> None:
    """Ranks other than the first build the model without its weights under fsdp and zero3."""
    import torch

    def build(recipe: Recipe) -> Any:
        READ_WEIGHTS.set(lambda read, build: (build(), []))
        return load_model("AutoModelForCausalLM", recipe, new_head=False, dtype=torch.float32)[0]

    trusting = recipe_of(own_model)
    with pytest.raises(InputError, match="comes with Python code of its own"):
        copy_context().run(build, with_consent(trusting, trusted=False))
    assert not marker.exists()
    assert type(copy_context().run(build, trusting)).__name__ == "OwnModel" and marker.exists()


def test_resume_of_a_checkpoint_with_stored_trust_ignores_it(model: Path) -> None:
    state = {"recipe": recipe_of(model).model_dump(mode="json"), "step": 1, "data": {"rows": 4, "fingerprint": ""}}
    assert state["recipe"]["model"]["trust_remote_code"] is True
    assert recipe_changes(state, recipe_of(model, model={"name": str(model)})) == ([], [])


def test_resume_with_trusted_model_code_runs_no_commit_that_the_checkpoint_names(
    tmp_path: Path, own_model: Path, marker: Path, ftcli: Ftcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can add a commit to a repository on the hub as a pull request."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    own, foreign = "a" * 40, "b" * 40
    repository = tmp_path / "hub" / "models--org--coded"
    for commit in (own, foreign):
        shutil.copytree(own_model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(own)
    mine = recipe_of(own_model, model={"name": "org/coded", "trust_remote_code": True})
    theirs = with_consent(mine, trusted=False).model_copy(deep=True)
    theirs.model.__dict__["revision"] = foreign
    run, checkpoint = foreign_run(tmp_path, theirs, own_model)
    entry = {"key": "model", "name": "org/coded", "revision": None, "commit": foreign}
    update_state(checkpoint, resolution=[entry])
    (tmp_path / "mine.yaml").write_text(dump_recipe(mine))
    for target in (run, checkpoint):
        code, _, err = ftcli("train", "mine.yaml", "--cpu", "--output", "mine", "--resume", target)
        assert code == 2 and f"model.revision: '{foreign}' -> '{own}'" in err and "name it in model.revision" in err
    assert not marker.exists()
    state = read_state(checkpoint)
    assert resolve(mine, state).recipe.model.revision == own
    assert resolve(with_consent(mine, trusted=False), state).recipe.model.revision == foreign  # no code: its weights


@pytest.mark.parametrize(
    "key", ["_attn_implementation", "attn_implementation", "_experts_implementation", "_attn_implementation_internal"]
)
def test_generate_of_an_adapter_whose_base_names_a_kernel_is_refused(
    key: str, tmp_path: Path, model: Path, ftcli: Ftcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository, commit = tmp_path / "hub" / "models--org--kernel", "a" * 40
    base = repository / "snapshots" / commit
    shutil.copytree(model, base)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {key: "someone/kernel"}))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, adapter)

    def refused(target: object, *, by: str) -> None:
        code, _, err = ftcli("generate", target, "--cpu", "--prompt", "a")
        assert code == 2 and f"{by} names the kernel someone/kernel" in err and FLAG in err

    for name, revision in ((str(base), None), ("org/kernel", commit), ("org/kernel", None)):
        about = {"base_model_name_or_path": name, "peft_type": "LORA", "revision": revision}
        (adapter / "adapter_config.json").write_text(json.dumps(about))
        refused(adapter, by=str(base / "config.json"))
    refused("org/kernel", by=str(base / "config.json"))
    (adapter / "adapter_config.json").write_text(json.dumps(about | {"base_model_name_or_path": str(model)}))
    (adapter / "base_config").mkdir()  # with which an export of a classifier is loaded
    (adapter / "base_config" / "config.json").write_text(json.dumps(config | {key: "someone/kernel"}))
    refused(adapter, by=str(adapter / "base_config" / "config.json"))


@pytest.mark.slow
def test_trust_with_a_module_in_the_current_folder_is_not_imported_for_a_library(
    tmp_path: Path, model: Path, marker: Path, ftcli: Ftcli
) -> None:
    for name in ("torch", "json", "ftcli"):
        (tmp_path / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()\nraise SystemExit(0)")
    run, _ = foreign_run(tmp_path, recipe_of(model), model)
    assert ftcli("export", run, "out")[0] == 0
    (tmp_path / "own.py").write_text("from ftcli.tasks.sft import Options, Task\nimport beside\n")
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe_of(model, task="./own.py", task_options={"no": 1})))
    command = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-I", "-m", "ftcli", "check", "r.yaml"]
    message = subprocess.run(command, capture_output=True, text=True).stderr
    assert "unknown key 'no' in task_options" in message and not marker.exists()


def test_check_links_with_an_export_copies_no_file_from_elsewhere(tmp_path: Path, model: Path, ftcli: Ftcli) -> None:
    (tmp_path / "secret").write_text("private key")
    final = tmp_path / "model"
    save_tiny_causal(final)
    run, _ = foreign_run(tmp_path, recipe_of(model), final)
    (final / "inside").symlink_to(final / "config.json")
    check_links(run / "final")
    (final / "LICENSE").symlink_to(tmp_path / "secret")
    code, _, err = ftcli("export", run, "out")
    assert code == 2 and "LICENSE is a link to" in err
    assert not (tmp_path / "out").exists()


def test_check_configs_with_an_index_of_weights_names_no_file_outside_of_its_folder(tmp_path: Path) -> None:
    for name in ("../other.safetensors", "/other.safetensors", "a/../../other.safetensors"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(InputError, match="which lies outside of the folder"):
            check_configs(tmp_path, trusted=True)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "a..b/c.safetensors"}}))
    check_configs(tmp_path, trusted=False)


def test_every_from_pretrained_call_passes_trust_remote_code() -> None:
    """Without a word transformers asks on the terminal; peft's own classes and GenerationConfig load no code."""
    folder = Path(ftcli_package.__file__).parent
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    assert set(OWN_FOLDERS) <= set(files)
    sources = {name: path.read_text() for name, path in files.items() if name not in OWN_FOLDERS}
    silent = [
        f"{name}: {ast.unparse(call)}"
        for name, source in (sources | {"RELOAD": RELOAD}).items()
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith((".from_pretrained", ".from_config"))
        if not any(word.arg in (None, "trust_remote_code") for word in call.keywords)
        if not ast.unparse(call.func).startswith(("PeftModel.", "GenerationConfig."))
    ]
    assert silent == []


def test_describe_environment_configuration_of_a_foreign_repository_starts_nothing(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init"], ["add", "file"], [*who, "commit", "-m", "x"], ["config", "core.fsmonitor", "./monitor"]):
        subprocess.run(["git", *command], check=True, capture_output=True)
    (tmp_path / "monitor").write_text(f"#!/bin/sh\ntouch {marker}\n")
    (tmp_path / "monitor").chmod(0o755)
    subprocess.run(["git", "describe", "--always", "--dirty"], check=True, capture_output=True)
    assert marker.exists()
    marker.unlink()
    assert describe_environment("cpu", 1)["git_commit"] and not marker.exists()


def test_load_of_pickled_weights_is_refused_without_running_code(
    tmp_path: Path, model: Path, marker: Path, ftcli: Ftcli
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (marker,)

    full, adapter = save_tiny_causal(tmp_path / "full"), tmp_path / "adapter"
    base = AutoModelForCausalLM.from_pretrained(model)
    base.name_or_path = str(model)
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).save_pretrained(adapter)
    for folder, name in ((full, "pytorch_model.bin"), (adapter, "adapter_model.bin")):
        (path,) = folder.glob("*model.safetensors")
        path.unlink()
        torch.save({"weight": Evil()}, folder / name)
    code, _, err = ftcli("generate", full, "--cpu", "--prompt", "a")
    assert code == 2 and "holds pickled objects besides tensors" in err
    with pytest.raises(InputError, match="holds pickled objects besides tensors"):
        load_plain("AutoModelForCausalLM", adapter)
    own = recipe_of(model, adapter={"type": "lora", "path": str(adapter)})
    (tmp_path / "rows.jsonl").write_text(ROWS * 4)
    (tmp_path / "r.yaml").write_text(dump_recipe(own))
    code, _, err = ftcli("check", "r.yaml")
    assert code == 2 and "no adapter_model.safetensors" in err and not marker.exists()
