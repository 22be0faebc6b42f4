"""Light modules do not import torch, and public names refer to the documented objects."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.utils import canonicalize_name

import ftcli

# What is imported under another name than it is installed by.
SOLD_AS = {"PIL": "pillow", "yaml": "PyYAML", "sklearn": "scikit-learn", "pydantic_core": "pydantic"}
SOLD_AS["pynvml"] = "nvidia-ml-py"
COMES_WITH_TORCH = {"triton"}  # PyTorch for GPUs requires the version that it was built with
ROOT = Path(__file__).resolve().parents[2]
DECLARED = {"accelerate", "datasets", "deepspeed", "filelock", "fsspec", "huggingface_hub", "jinja2", "numpy", "pynvml"}
DECLARED |= {"packaging", "peft", "PIL", "psutil", "pyarrow", "pydantic", "yaml", "rich", "safetensors", "tokenizers"}
DECLARED |= {"torch", "tqdm", "transformers", "typer"}
HEAVY = {"torch", "transformers", "datasets", "accelerate", "peft", "deepspeed"}
# Layers whose modules import heavy packages inside functions only, with every module of ftcli that they import.
LIGHT_LAYERS = ("runtime", "config", "launch", "reports", "cli")


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)


def test_imported_packages_are_declared_dependencies() -> None:
    text = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2].partition("[project.scripts]")[0]
    declared = {canonicalize_name(name) for name in re.findall(r'"([A-Za-z][\w.-]*)', text)}
    imported = set()
    for path in Path(ftcli.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(str(node.module).partition(".")[0])
    foreign = {SOLD_AS.get(name, name) for name in imported - sys.stdlib_module_names - COMES_WITH_TORCH}
    assert sorted(name for name in foreign if canonicalize_name(name) not in declared) == []


def test_light_modules_import_no_heavy_package() -> None:
    package = Path(ftcli.__file__).parent
    files = [path for layer in LIGHT_LAYERS for path in sorted((package / layer).rglob("*.py"))]
    paths = [path.relative_to(package.parent).with_suffix("") for path in files]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    assert len(names) > 60
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"    if heavy := set(sys.modules) & {HEAVY!r}:\n"
        "        sys.exit(f'{name} imports {heavy}')\n"
    )
    run_python("-c", script)


WITHOUT_ADAPTER = """
import sys
from ftcli.models.adapters import add_adapter
from ftcli.config.recipe import Recipe
sections = {"model": {"name": "m"}, "data": {"train": "x.jsonl", "max_length": 16}, "batch": {"global_size": 8}}
sections |= {"train": {"max_steps": 1}, "optimizer": {"learning_rate": 1e-3}}
model = object()
assert add_adapter(model, Recipe(task="sft", **sections), keep=[], task_type=None) is model
print(*({"peft", "bitsandbytes"} & set(sys.modules)))
"""


def test_prepare_without_an_adapter_imports_no_peft() -> None:
    assert run_python("-c", WITHOUT_ADAPTER).stdout.split() == []


PLAN = """
import json, sys
from pathlib import Path
from ftcli.__main__ import main
Path("config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048,
    "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}))
values = {"task": "sft", "precision": "bf16", "model": {"name": "."}, "data": {"train": "x.jsonl", "max_length": 4096},
    "batch": {"global_size": 64, "micro_size": 8}, "train": {"max_steps": 10}, "optimizer": {"learning_rate": 1e-5}}
Path("recipe.yaml").write_text(json.dumps(values))
names = "single,ddp,fsdp,zero2,zero3"
try: main(["plan", "recipe.yaml", "--profiles", names, "--gpus", "8", "--gpu", "H100"])
except SystemExit as exit_: assert not exit_.code
"""


# Counts the calls of Python functions, with those of the imports: the time to start, whatever else the machine does.
COUNTED = """
import sys
calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
"""


def calls_and_packages(script: str, folder: Path) -> tuple[int, set[str]]:
    """Return how many calls a script makes in a new process, and which of the packages that we declare it imports."""
    packages = sorted(DECLARED)
    told = f"sys.setprofile(None); print(calls, *(set(sys.modules) & set({packages!r})), file=sys.stderr)"
    line = [sys.executable, "-c", f"{COUNTED}{script}\n{told}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    calls, *imported = done.stderr.split()
    assert done.stdout
    return int(calls), set(imported)


def test_plan_of_five_profiles_makes_few_calls_and_imports_no_heavy_package(tmp_path: Path) -> None:
    calls, packages = calls_and_packages(PLAN, tmp_path)
    assert packages == {"typer", "pydantic", "yaml"}
    assert calls < 450_000  # some 280,000 in half a second


def test_import_ftcli_loads_neither_typer_nor_pydantic() -> None:
    script = "import sys, ftcli; print(*({'typer', 'pydantic', 'yaml', 'rich'} & set(sys.modules)))"
    assert run_python("-c", script).stdout.split() == []


HELP = """
from ftcli.__main__ import main
try: main(["--help"])
except SystemExit as exit_: assert not exit_.code
"""


def test_help_makes_few_calls_and_imports_typer_only(tmp_path: Path) -> None:
    calls, packages = calls_and_packages(HELP, tmp_path)
    assert packages == {"typer"}
    assert calls < 130_000  # some 87,000 in a sixth of a second


def test_help_imports_no_heavy_package() -> None:
    script = (
        "import sys\nfrom ftcli.__main__ import main\n"
        "try: main(['train', '--help'])\n"
        f"except SystemExit: print(*(set(sys.modules) & {HEAVY!r}), file=sys.stderr)"
    )
    assert run_python("-c", script).stderr.split() == []


def test_public_names_are_functions_or_classes_and_never_modules() -> None:
    modules = {path.stem for path in Path(ftcli.__file__).parent.glob("*.py")}
    assert not modules & set(ftcli.__all__)
    for name in ftcli.__all__:
        value = getattr(ftcli, name)
        assert callable(value) and not isinstance(value, ModuleType), name
        assert value.__name__ == name
        assert getattr(ftcli, name) is value  # still the same once its module is imported
    assert set(ftcli.__all__) <= set(dir(ftcli))


def test_type_checkers_see_the_same_public_names() -> None:
    tree = ast.parse(Path(ftcli.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {
        (item.name, node.module) for node in guarded.body if isinstance(node, ast.ImportFrom) for item in node.names
    }
    assert declared == set(ftcli._MODULES.items())
    assert sorted(ftcli._MODULES) == sorted(ftcli.__all__)


def test_getattr_of_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = ftcli.trian
