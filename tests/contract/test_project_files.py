"""Files beside the package: the hosted workflow, the hooks and CONTRIBUTING.md use the tools that the Makefile uses."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PINNED_TOOLS = ("ruff", "mypy")


def make_targets() -> set[str]:
    """Return the targets that the Makefile declares for its users."""
    (declared,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return set(declared.split())


def workflow_commands() -> list[str]:
    """Return every command of the hosted workflow."""
    workflow: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def test_workflow_calls_make_targets_that_exist_and_installs_nothing_itself() -> None:
    called = [command.split()[1] for command in workflow_commands() if command.startswith("make ")]
    assert {"test", "test-all", "test-latest", "docs"} == set(called) and set(called) <= make_targets()
    assert [command for command in workflow_commands() if not command.startswith("make ")] == ["git diff --exit-code"]


def test_contributing_names_make_targets_that_exist() -> None:
    named = re.findall(r"(?:^ {4}|`)make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert len(named) > 5 and set(named) <= make_targets()


def test_hooks_use_the_pinned_tools_of_the_environment() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert {repository["repo"] for repository in repositories} == {"local"}
    hooks = [hook for repository in repositories for hook in repository["hooks"]]
    for tool in PINNED_TOOLS:
        entries = [hook["entry"] for hook in hooks if tool in hook["id"]]
        assert entries and all(entry.startswith(f".venv/bin/{tool} ") for entry in entries)
        assert re.search(rf"^{tool}==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_make_test_latest_installs_the_pinned_torch() -> None:
    (pin,) = re.findall(r"^torch==.+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    plan = subprocess.run(["make", "-n", "test-latest"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installs = [line for line in plan.splitlines() if "pip install" in line]
    assert len(installs) == 3 and all(f"'{pin}'" in line for line in installs)
    assert "--upgrade" in installs[-1] and "constraints.txt" not in " ".join(installs)


def package_folders() -> list[Path]:
    """Return the folder of every package inside ftcli."""
    return sorted(init.parent for init in (ROOT / "ftcli").rglob("__init__.py") if init.parent.name != "ftcli")


def test_package_readmes_list_exactly_the_modules_of_their_package() -> None:
    assert len(package_folders()) > 12
    for folder in package_folders():
        lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
        listed = [match[1] for line in lines if (match := re.match(r"\| `([\w./]+)` \| .+ \|$", line))]
        modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        packages = [f"{init.parent.name}/" for init in folder.glob("*/__init__.py")]
        assert sorted(listed) == sorted([*modules, *packages]), folder.relative_to(ROOT)


def test_package_readme_is_short_and_names_importers_and_first_module() -> None:
    for folder in package_folders():
        lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 40 and lines[0] == f"# {folder.relative_to(ROOT).as_posix()}", folder
        for subject in ("May be imported by: ", "Start reading: "):
            assert sum(line.startswith(subject) for line in lines) == 1, folder


def test_contributing_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:ftcli|tests|docs|recipes|accelerate_configs)/[\w./-]*)`", text)
    linked = re.findall(r"\]\(([\w./-]+)\)", text)
    assert len(named) > 15 and len(linked) > 3
    assert [name for name in [*named, *linked] if not (ROOT / name).exists()] == []


def test_dockerfile_pins_the_torch_of_constraints_and_runs_without_root_with_a_health_check() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (pin,) = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set(re.findall(r"^ARG TORCH_VERSION=(.+)$", text, re.MULTILINE)) == {pin}
    stages = re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    images = {name: body for name, body in stages if not name.endswith("-base")}
    assert set(images) == {"cpu", "gpu"} and stages[-1][0] == "gpu"  # the last one is the default
    for body in images.values():
        assert "--constraint constraints.txt" in body and re.findall(r"^USER (.+)$", body, re.MULTILINE) == ["10001"]
        assert re.search(r'^HEALTHCHECK .*CMD \["ftcli", "doctor"\]$', body, re.MULTILINE)


def test_dockerignore_admits_exactly_what_the_dockerfile_copies() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert "*" in lines and lines.index("*") < min(index for index, line in enumerate(lines) if line[:1] == "!")
    assert {line[1:] for line in lines if line[:1] == "!"} == {name for names in copied for name in names.split()}
    assert [name for names in copied for name in names.split() if not (ROOT / name).exists()] == []
