"""The patch registry: optional patches left out, required patches refused, and log lines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from ftcli.runtime import patches
from ftcli.runtime.errors import InputError
from ftcli.runtime.patches import REGISTRY, WITHOUT, Patch, declare, has_changed, source_digest


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the declared patches after a test."""
    before = dict(REGISTRY)
    patches.clear_caches()
    yield
    REGISTRY.clear()
    REGISTRY.update(before)
    patches.clear_caches()


def patch_of(**changes: Any) -> Patch:
    values: dict[str, Any] = {
        "library": "packaging",
        "versions": ">=20,<9999",
        "purpose": "Reads versions",
        "without": "Versions are then not read.",
        "alternative": "None.",
        "apis": ("packaging.version:Version._key",),
    }
    return declare(__name__, "of-this-test", **values | changes)


def test_is_usable_of_a_tested_version_with_all_names_is_true_and_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert patch_of().is_usable()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"versions": ">=1,<2"}, "is installed, and the patch was tested with >=1,<2"),
        ({"apis": ("packaging.version:Version._gone",)}, "has no packaging.version.Version._gone"),
        ({"also": lambda: "its arguments differ"}, "its arguments differ"),
    ],
)
def test_is_usable_of_another_version_or_without_a_name_is_false_and_logged_once(
    changes: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    patch = patch_of(**changes)
    assert not patch.is_usable() and not patch.is_usable()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ftcli: patch of-this-test is left out: ") and reason in line
    assert line.endswith("Versions are then not read.")


def test_is_usable_on_another_rank_logs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert not patch_of(versions=">=1,<2").is_usable()
    assert capsys.readouterr().err == ""


def test_is_usable_of_a_library_that_is_not_installed_is_false_and_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert not patch_of(library="no-such-distribution").is_usable()
    assert capsys.readouterr().err == ""


def test_is_usable_of_a_patch_that_the_environment_leaves_out_is_false(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = patch_of()
    monkeypatch.setenv(WITHOUT, "lora-scaling, of-this-test,")
    assert not patch.is_usable()
    monkeypatch.setenv(WITHOUT, "lora-scaling")
    assert patch.is_usable()


def test_is_usable_with_a_name_that_no_patch_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = patch_of()
    monkeypatch.setenv(WITHOUT, "of-this-test, foreach-gradient")
    for check in (patch.is_usable, patch.require):
        with pytest.raises(InputError, match="FTCLI_WITHOUT_PATCHES contains foreach-gradient, and") as error:
            check()
        assert "did you mean 'foreach-gradients'?" in str(error.value)
    monkeypatch.setenv(WITHOUT, "xyz")
    with pytest.raises(InputError, match="patches.md lists the names"):
        patch.is_usable()


def test_is_usable_of_a_local_build_of_a_tested_version_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches.importlib.metadata, "version", lambda name: "2.11.0+cu128")
    assert patch_of(versions=">=2.11,<2.14").is_usable()


def test_require_without_a_name_states_library_versions_and_remedy() -> None:
    patch = patch_of(apis=("packaging.version:Version._gone",), required=True)
    with pytest.raises(InputError) as error:
        patch.require()
    for part in ("Reads versions. ", "has no packaging.version.Version._gone", "tested with packaging>=20,<9999"):
        assert part in str(error.value)
    assert f"pip install 'packaging>=20,<9999'; {patch.installed} is installed" in str(error.value)


def test_require_of_a_left_out_patch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WITHOUT, "of-this-test")
    with pytest.raises(InputError, match="FTCLI_WITHOUT_PATCHES must not contain of-this-test"):
        patch_of(required=True).require()


def test_require_of_an_untested_version_with_all_names_is_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    patch = patch_of(versions=">=1,<2", required=True)
    patch.require()
    patch.require()
    (line,) = capsys.readouterr().err.splitlines()
    assert "was tested with >=1,<2; all names that it uses exist" in line


def test_declare_of_a_name_that_another_module_uses_is_refused() -> None:
    patch_of()
    with pytest.raises(ValueError, match="which tests.+ has declared|which .*test_patches has declared"):
        declare(
            "another",
            "of-this-test",
            library="torch",
            versions=">=1,<2",
            purpose="",
            without="",
            alternative="",
            apis=(),
        )


def test_has_changed_names_a_function_whose_code_is_not_the_known_one() -> None:
    api = "packaging.version:Version.__init__"
    assert has_changed({api: source_digest(api)})() is None
    assert has_changed({api: "0"})() == "the code of packaging.version.Version.__init__ is not the code that was tested"


@pytest.mark.parametrize("api", ["packaging.version:Version.no_such", "no_such_module:name", "builtins:len"])
def test_has_changed_of_a_function_that_does_not_exist_or_has_no_text_is_a_change(api: str) -> None:
    assert "is not the code that was tested" in (has_changed({api: "0"})() or "")


def test_source_digest_does_not_depend_on_decorators_of_other_libraries() -> None:
    known = source_digest("packaging.version:parse")
    import packaging.version

    plain = packaging.version.parse
    packaging.version.parse = contextlib.contextmanager(plain)
    decorated = source_digest("packaging.version:parse")
    packaging.version.parse = plain
    assert decorated == known and len(known) == 12
