"""The boundary around readers: their exceptions name the file, and what is read and printed is bounded."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest
from datasets.exceptions import DatasetGenerationError
from pyarrow.json import read_json

from ftcli.__main__ import main
from ftcli.config.load import load_recipe
from ftcli.config.plan import derive_batches
from ftcli.config.profile import load_profile
from ftcli.config.recipe_data import Source
from ftcli.config.yaml_document import MOST_DEPTH, parse_document, parse_value, read_document
from ftcli.data.hub_data import explain_hub_errors
from ftcli.data.image_folders import image_files, walk_images
from ftcli.data.streaming.corpus import Renamed
from ftcli.data.streaming.lanes import Corpus
from ftcli.runtime.errors import MOST_PROBLEMS, InputError, Problem, RunError, nearest
from ftcli.runtime.reader_errors import path_problem, reading, reason, user_path

from ...support.counting import count_calls, count_lines

RECIPE = """\
task: sft
model: {name: somebody/some-model}
data: {train: rows.jsonl}
batch: {global_size: 4}
train: {max_steps: 2}
optimizer: {learning_rate: 1e-3}
"""
DDP = "distributed_type: MULTI_GPU\n"
HALF = '"\\ud800"'  # YAML's escape for half of a surrogate pair


def problem_of_recipe(folder: Path, *overrides: str, text: str = RECIPE) -> str:
    path = folder / "r.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        load_recipe(path, overrides)
    return str(error.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    "raised",
    [ValueError("odd\nmore"), RecursionError(), KeyError("a"), TypeError(), OSError(5, "Input/output error")],
    ids=lambda error: type(error).__name__,
)
def test_reading_any_exception_of_a_reader_names_the_file(raised: Exception) -> None:
    with pytest.raises(InputError, match=r"^rows\.csv:3: cannot be read: \S+") as error, reading("rows.csv:3", "look"):
        raise raised
    assert error.value.__cause__ is raised and "more" not in str(error.value)
    assert error.value.problems[0].hint == "look"


@pytest.mark.parametrize("raised", [InputError("own"), RunError("own"), MemoryError("own"), KeyboardInterrupt("own")])
def test_reading_passes_other_exceptions_through(raised: BaseException) -> None:
    with pytest.raises(type(raised), match="own"), reading("rows.csv"):
        raise raised


BAD_PATHS = {
    "~nouser/x": "names a user who does not exist: ~nouser",
    "n" * 256: "contains a name of more than 255 bytes",
    "a/" + "é" * 128 + "/b": "contains a name of more than 255 bytes",
    "n/" * 2048: "is longer than 4,095 bytes",
    "a\0b": "contains a NUL character",
    "\ud800": "contains half of a surrogate pair",
}


@pytest.mark.parametrize("path", BAD_PATHS, ids=lambda path: ascii(path[:12]))
def test_user_path_that_cannot_exist_is_refused(path: str) -> None:
    with pytest.raises(InputError) as error:
        user_path(path)
    assert BAD_PATHS[path] in str(error.value) and len(str(error.value)) < 300
    with pytest.raises(InputError, match="^--resume: this path"):
        user_path(path, "--resume")


@pytest.mark.parametrize("path", ["~", "~/x", "nobody/nothing", "n" * 255, ".", "https://a.b/c?d=e", "é/😀.jsonl", ""])
def test_path_problem_of_an_ordinary_name_is_none(path: str) -> None:
    assert path_problem(path) is None


@pytest.mark.parametrize(
    "key", ["model.name", "adapter.path", "data.train", "output", "evaluate.generate.file", "task"]
)
def test_recipe_path_that_cannot_exist_is_named_by_its_key(key: str, tmp_path: Path) -> None:
    for path in ("~nouser/x", "n" * 300):
        assert f"{key}" in (message := problem_of_recipe(tmp_path, f"{key}={path}")) and "this path" in message, message


YAML_1_1 = ["main_training_function: =", "gpu_ids: 2024-13-45", "<<: 5", "debug: !foo true", "? {a: 1}\n: b", "x: &a 1"]


@pytest.mark.parametrize("line", YAML_1_1)
def test_load_profile_what_a_yaml_1_1_reader_refuses_is_named_with_its_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"{DDP}{line}\n")
    with pytest.raises(InputError, match=r"p\.yaml:[12]"):
        load_profile(path)


def test_load_profile_two_names_of_one_key_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  version: 1\n")
    with pytest.raises(InputError, match=r"p\.yaml:4: fsdp_config has both version and fsdp_version"):
        load_profile(path)


@pytest.mark.parametrize("number", ["9" * 5000, str(2**63), str(-(2**63) - 1), "0x" + "f" * 17, "0o" + "7" * 90])
def test_parse_document_integers_beyond_64_bits_are_refused(number: str) -> None:
    document = parse_document(f"a: 1\nb: {number}\n", "f")
    assert [problem.where for problem in document.problems] == ["f:2"]
    assert "is too large" in str(document.problems[0]) and len(str(document.problems[0])) < 200
    assert parse_value(str(2**63 - 1), "f") == 2**63 - 1


def test_parse_document_half_of_a_surrogate_pair_is_refused() -> None:
    document = parse_document(f"a: {HALF}\nb: é😀\n", "f")
    assert document.values["b"] == "é😀"
    assert [str(problem).partition("\n")[0] for problem in document.problems] == [
        "f:1: this text contains half of a surrogate pair"
    ]


def test_parse_document_depth_and_number_of_values_are_bounded() -> None:
    assert parse_document("a: " + "[" * (MOST_DEPTH - 2) + "]" * (MOST_DEPTH - 2), "f").values
    for text, message in {
        "a: " + "[" * 400 + "]" * 400: "f:1: not valid YAML: nested too deeply",
        "a: [" + "1," * 25_000 + "]": "f:1: not valid YAML: more than 20,000 values",
    }.items():
        with pytest.raises(InputError) as error:
            parse_document(text, "f")
        assert str(error.value) == message


def test_read_document_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("a: " + "x" * 10_000_000)
    tracemalloc.start()
    with pytest.raises(InputError, match=r"r\.yaml: is larger than 1 MiB"):
        read_document(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 5_000_000


@pytest.mark.parametrize("key", ["batch.global_size", "batch.micro_size", "data.eval_rows", "train.epochs"])
def test_recipe_sizes_that_only_a_slip_can_give_are_refused(key: str, tmp_path: Path) -> None:
    assert f"{key}: is more than 1,000,000,000,000" in problem_of_recipe(tmp_path, f"{key}={10**12 + 1}")


def test_derive_batches_of_huge_sizes_takes_steps_as_the_square_root() -> None:
    assert derive_batches(2**39, 2**38 + 1, 1) == (2**38, 2)
    assert derive_batches(97, 50, 1) == (1, 97) and derive_batches(60, 7, 1) == (6, 10)
    few, many = (count_lines(lambda rows=rows: derive_batches(rows, rows // 2 + 1, 1)) for rows in (2**20, 2**26))
    assert many < 10 * few  # 8 times, for 64 times the rows


@pytest.mark.parametrize("where", ["", "data:\n  train: rows.jsonl\n"])
def test_load_recipe_thousands_of_unknown_keys_are_bounded(where: str, tmp_path: Path) -> None:
    """No suggestion is searched for a key that is not shown: those for 20,000 keys took 200 seconds."""
    indent = "  " if where else ""
    text = RECIPE.replace("data: {train: rows.jsonl}\n", "") + (where or "data: {train: rows.jsonl}\n")
    text += "".join(f"{indent}lerning_rate{n}: 1\n" for n in range(9_000))
    assert count_calls(lambda: problem_of_recipe(tmp_path, text=text), nearest) <= 3 * MOST_PROBLEMS
    message = problem_of_recipe(tmp_path, text=text)
    assert message.count("unknown key") == MOST_PROBLEMS and message.endswith("more mistakes are not shown")


def test_load_profile_thousands_of_unknown_keys_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(DDP + "".join(f"num_procesess{n}: 1\n" for n in range(9_000)))

    def load() -> None:
        with pytest.raises(InputError) as error:
            load_profile(path)
        assert len(error.value.problems) == MOST_PROBLEMS + 1

    assert count_calls(load, nearest) <= 3 * MOST_PROBLEMS


LONG = "x" * 500_000


@pytest.mark.parametrize(
    "changes",
    [
        f"seed: {LONG}",
        f"{'k' * 1000}: 1",
        f"precision: {LONG}",
        f"log: {{trackers: [{LONG}]}}",
        f"seed: !{LONG} 1",
        f"seed: 0x{'f' * 500_000}",
        f"log: {{trackers: {LONG}}}",
        f"task_options: {{{'k' * 1000}: 1}}",
        f'"{"k" * 1000}\\e[31m": 1',
    ],
    ids=lambda text: text[:20],
)
def test_load_recipe_long_values_are_shortened_in_messages(changes: str, tmp_path: Path) -> None:
    message = problem_of_recipe(tmp_path, text=f"{RECIPE}{changes}\n")
    assert len(message) < 2500 and "characters)" in message
    assert "\x1b" not in message


def test_problem_text_is_short_and_without_control_characters() -> None:
    assert str(Problem("a\x1b[31m\ud800\0é\n😀", "f:1")) == "f:1: a\\x1b[31m\\ud800\\x00é\n😀"
    assert len(str(Problem(LONG, LONG, LONG))) < 4000
    assert nearest("lerning_rate" * 1000, ["learning_rate"]) == ""
    assert nearest("lerning_rate", ["learning_rate"])


def test_image_files_of_a_folder_that_holds_other_things_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing `/` took a minute."""
    monkeypatch.setattr("ftcli.data.image_folders.MOST_OTHERS", 20)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").touch()
    assert image_files(tmp_path) == [(tmp_path / "a" / "1.png", "a")]
    for number in range(21):
        (tmp_path / "a" / f"{number}.o").touch()
    with pytest.raises(InputError, match="is not a folder of images: 1 of its first 22 files are images"):
        image_files(tmp_path)


def test_image_files_a_folder_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gone: cannot be listed: no such file or directory"):
        list(walk_images(tmp_path / "gone"))


def test_main_with_an_unexpected_exception_prints_how_to_report_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["check", 5])  # type: ignore[list-item]
    printed = capsys.readouterr().err
    assert end.value.code == 1 and "Traceback" in printed
    assert "it is a bug in ftcli" in printed.splitlines()[-2] and "`ftcli version`" in printed.splitlines()[-1]


def test_reason_counts_the_rows_of_arrow_from_one() -> None:
    with pytest.raises(pa.ArrowInvalid, match="in row 1") as error:
        read_json(io.BytesIO(b'{"a": 1}\n{"a": "x"}\n'))
    assert reason(error.value) == "JSON parse error: Column(/a) changed from number to string in row 2"
    assert reason(ValueError("column 3 in row 1")) == "column 3 in row 1"  # not Arrow's
    message = r"data set org/rows cannot be read: .*changed from number to string in row 2"
    with pytest.raises(InputError, match=message), explain_hub_errors(Source(path="org/rows")):
        raise DatasetGenerationError("An error occurred while generating the dataset") from error.value
    corpus = Corpus((1,), lambda file, skip: (_ for _ in [read_json(io.BytesIO(b"[1]"))]), ("f.json",))
    with pytest.raises(InputError, match="f.json cannot be read after row 0: .* in row 1"):
        list(Renamed(corpus, {})(0, 0))


@pytest.mark.parametrize(("word", "hint"), [("predict", ""), ("trian", "did you mean 'train'?")])
def test_main_suggests_a_command_only_where_one_is_close(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([word])
    printed = capsys.readouterr().err
    assert end.value.code == 2 and f"No such command '{word}'." in printed
    assert hint in printed and ("mean" in printed) == bool(hint)


def test_quiet_libraries_draw_no_bars_also_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import transformers

    from ftcli.hardware.environment import quiet_libraries

    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    datasets.enable_progress_bars()
    transformers.utils.logging.enable_progress_bar()
    quiet_libraries()
    assert datasets.are_progress_bars_disabled() and not transformers.utils.logging.is_progress_bar_enabled()
