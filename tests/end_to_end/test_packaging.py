"""What a user installs: a wheel or a checkout, each with its recipes and profiles found by name.

Builds and installs for real, into a temporary folder. Knows nothing of what recipes and profiles say.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
TESTED_EXTRAS = ("", "quickstart", "vision", "tensorboard", "notebook", "dev", "docs")


def run_python(*arguments: str, cwd: Path, **environment: str) -> str:
    """Run this interpreter in `cwd`, seeing only `environment`'s PYTHONPATH, and return its stdout."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FTCLI_LAUNCHED")}
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def listed_names(output: str) -> list[str]:
    """Return the first word of each line."""
    return [line.split()[0] for line in output.splitlines() if line.strip()]


def names_beside(folder: Path) -> list[str]:
    """Return the names of the YAML files below `folder`, as `show` lists them."""
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    run_python(*pip, str(ROOT), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target))
    run_python(*pip, str(wheel), cwd=target)
    return target


def test_installed_wheel_finds_recipes_and_profiles_by_name(installed: Path, tmp_path: Path) -> None:
    path = str(installed)
    where = run_python("-c", "import ftcli; print(ftcli.__file__)", cwd=tmp_path, PYTHONPATH=path)
    assert Path(where.strip()).is_relative_to(installed)  # this wheel, not the checkout

    recipes = listed_names(run_python("-m", "ftcli", "show", "recipes", cwd=tmp_path, PYTHONPATH=path))
    profiles = listed_names(run_python("-m", "ftcli", "show", "profiles", cwd=tmp_path, PYTHONPATH=path))
    assert "quickstart" in recipes and recipes == names_beside(ROOT / "recipes")
    assert "ddp" in profiles and profiles == names_beside(ROOT / "accelerate_configs")


def test_editable_checkout_finds_recipes_and_profiles_by_name(tmp_path: Path) -> None:
    where = run_python("-c", "import ftcli; print(ftcli.__file__)", cwd=tmp_path)
    assert Path(where.strip()) == ROOT / "ftcli" / "__init__.py"

    recipes = listed_names(run_python("-m", "ftcli", "show", "recipes", cwd=tmp_path))
    profiles = listed_names(run_python("-m", "ftcli", "show", "profiles", cwd=tmp_path))
    assert "quickstart" in recipes and recipes == names_beside(ROOT / "recipes")
    assert "ddp" in profiles and profiles == names_beside(ROOT / "accelerate_configs")


def test_wheel_contains_only_the_package_and_its_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    outside = [name for name in names if not name.startswith(("ftcli/", "ftcli-0.1.0.dist-info/"))]
    assert not outside
    assert "ftcli-0.1.0.dist-info/licenses/LICENSE" in names
    assert not [name for name in names if "__pycache__" in name]


def test_wheel_has_the_entry_point_ftcli(installed: Path, tmp_path: Path) -> None:
    script = str(installed / "bin" / "ftcli")
    assert "Commands:" in run_python(script, "--help", cwd=tmp_path, PYTHONPATH=str(installed))


def test_version_of_package_and_metadata_agree() -> None:
    import ftcli

    assert ftcli.__version__ == metadata.version("ftcli")


def test_constraints_pin_every_tested_dependency_inside_its_bounds() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", line) for line in lines)
    pins = dict(line.split("==") for line in lines)
    for extra in TESTED_EXTRAS:
        for requirement in map(Requirement, metadata.requires("ftcli") or []):
            if requirement.name == "ftcli" or not (
                requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            ):
                continue
            pinned = Version(pins[canonicalize_name(requirement.name)])
            assert requirement.specifier.contains(pinned, prereleases=True), requirement


def test_lower_bounds_admit_the_versions_of_the_gpu_tests() -> None:
    oldest = {"torch": "2.11.0", "transformers": "5.17.0", "accelerate": "1.15.0"}
    bounds = {r.name: r.specifier for r in map(Requirement, metadata.requires("ftcli") or [])}
    assert all(bounds[name].contains(version) for name, version in oldest.items())


def test_lower_bounds_equal_the_installable_set_of_oldest_txt() -> None:
    block = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [\n")[2].partition("\n]")[0]
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "tests" / "oldest.txt").read_text(), re.MULTILINE))
    for requirement in map(Requirement, re.findall(r'^    "(.+)",$', block, re.MULTILINE)):
        bounds = {part.operator: part for part in requirement.specifier}
        assert bounds.keys() <= {">=", "<"}
        bound = bounds[">="]
        assert requirement.name == "torch" or Version(pins[requirement.name]) == Version(bound.version)
