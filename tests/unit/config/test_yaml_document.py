"""YAML as plain values that know their lines: scalars by YAML 1.2, duplicates, and what is no mapping."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ftcli.config.yaml_document import dump_document, parse_document, parse_value, read_document
from ftcli.runtime.errors import InputError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1e5", 1e5),
        ("1E5", 1e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("+3", 3),
        ("007", 7),
        ("0o17", 15),
        ("0x1F", 31),
        ("-.inf", -math.inf),
        ("1_000", "1_000"),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("on", "on"),
        ("NO", "NO"),
        ("~", None),
        ("", None),
        ("null", None),
        ("2024-01-31", "2024-01-31"),
        ("1:30", "1:30"),
        ("'1e-4'", "1e-4"),
        ("[1e-4, a]", [1e-4, "a"]),
        ("{a: 1}", {"a": 1}),
        ("!!str 5", "5"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    parsed = parse_value(text, "here")
    assert parsed == value and type(parsed) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(parse_value(".nan", "here"))


def test_parse_document_stores_the_line_of_every_key_path() -> None:
    document = parse_document("a: 1\nb:\n  c: 2\n  d:\n    - x\n    - y: 3\n", "r.yaml")
    assert document.values == {"a": 1, "b": {"c": 2, "d": ["x", {"y": 3}]}}
    lines = {("a",): 1, ("b",): 2, ("b", "c"): 3, ("b", "d", 0): 5, ("b", "d", 1): 6, ("b", "d", 1, "y"): 6}
    assert {keys: document.where(keys) for keys in lines} == {k: f"r.yaml:{n}" for k, n in lines.items()}


def test_where_of_a_missing_path_returns_the_line_of_its_section() -> None:
    document = parse_document("# head\na:\n  b: 1\n", "r.yaml")
    assert document.where(("a", "c", "d")) == "r.yaml:2"
    assert document.where(("z",)) == "r.yaml:1"


def test_duplicate_keys_at_any_depth_are_problems_with_both_lines() -> None:
    document = parse_document("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n", "r.yaml")
    assert [str(problem) for problem in document.problems] == [
        "r.yaml:4: duplicate key 'b.c', first given in line 3\n    keep one of the two",
        "r.yaml:5: duplicate key 'a', first given in line 1\n    keep one of the two",
    ]
    assert document.values == {"a": 1, "b": {"c": 1}}


def test_read_document_with_a_file_is_read_with_its_name_in_every_place(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes("\ufeffname: Bär\n".encode())
    document = read_document(path)
    assert document.values == {"name": "Bär"} and document.where(("name",)) == f"{path}:1"


def test_read_document_with_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("# nothing yet\n")
    assert read_document(path).values == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: [1\nb: 2\n",
            "r.yaml:2: not valid YAML: expected ',' or ']', but got ':' (while parsing a flow sequence)",
        ),
        (
            "a: b: c\n",
            "r.yaml:1: not valid YAML: mapping values are not allowed here\n"
            "    is a colon missing in the line above, or is this one indented too far?",
        ),
        (
            "a: 1\n\tb: 2\n",
            "r.yaml:2: not valid YAML: found character '\\t' that cannot start any token (while scanning for the next "
            "token)\n    indent with spaces, not with tabs",
        ),
        (
            "a:\n    b: 1\n  c: 2\n",
            "r.yaml:3: not valid YAML: expected <block end>, but found '<block mapping start>' (while parsing a block "
            "mapping)\n    keys of one section have the same indentation",
        ),
        (
            "a: 1\nb 2\n",
            "r.yaml:3: not valid YAML: could not find expected ':' (while scanning a simple key)\n    a key is",
        ),
        ("- 1\n", "r.yaml:1: the file is not a mapping\n    write lines of the form `key: value`"),
        ("just words\n", "r.yaml:1: the file is not a mapping\n    write lines of the form `key: value`"),
        ("a: 1\n---\nb: 2\n", "r.yaml:2: not valid YAML: but found another document"),
        ("a: &x 1\nb: *x\n", "r.yaml:2: not valid YAML: aliases are not supported: repeat the value"),
    ],
)
def test_parse_document_that_is_no_mapping_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_document(text, "r.yaml")
    assert str(caught.value).startswith(message)


def test_parse_document_with_deep_nesting_is_refused() -> None:
    with pytest.raises(InputError, match="r.yaml:1: not valid YAML: nested too deeply"):
        parse_document("a: " + "[" * 5000 + "]" * 5000, "r.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1: a\n", "r.yaml:1: the key 1 is not text\n    put it in quotes"),
        ("[a]: 1\n", "r.yaml:1: a key is a list or a mapping\n    keys are plain text"),
        (
            "a: !!python/name:os.system x\n",
            "r.yaml:1: 'x' with the tag tag:yaml.org,2002:python/name:os.system is not",
        ),
        ("a: !!int x\n", "r.yaml:1: 'x' with the tag tag:yaml.org,2002:int is not supported"),
    ],
)
def test_parse_document_with_unsupported_keys_and_tags_reports_problems(text: str, message: str) -> None:
    assert str(parse_document(text, "r.yaml").problems[0]).startswith(message)


def test_missing_and_unreadable_files_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.yaml: no such file"):
        read_document(tmp_path / "gone.yaml")
    with pytest.raises(InputError, match="cannot be read: is a directory"):
        read_document(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"b: 1\na: \xe4\n")
    with pytest.raises(InputError, match=r"latin\.yaml:2: is not UTF-8 text: byte 8 cannot be read"):
        read_document(tmp_path / "latin.yaml")
    (tmp_path / "zero.yaml").write_bytes(b"a: \x00\n")
    with pytest.raises(InputError, match=r"zero\.yaml: not valid YAML: special characters are not allowed"):
        read_document(tmp_path / "zero.yaml")


def test_json_with_tabs_is_read_with_lines(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n\t"optimizer": {\n\t\t"lr": 1e-4\n\t}\n}\n')
    document = read_document(path)
    assert document.values == {"optimizer": {"lr": 1e-4}}
    assert document.where(("optimizer", "lr")) == f"{path}:3"


def test_parse_value_with_a_duplicate_key_raises() -> None:
    with pytest.raises(InputError, match="--set a: duplicate key 'b'"):
        parse_value("{b: 1, b: 2}", "--set a")


LOOK_ALIKES = ["1e-4", "1e5", "NO", "on", "0o7", "1_0", "1:30", "null", "~", "", "2024-01-01", "=", "<<"]
scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=20)
)
plain_values = st.recursive(
    scalars | st.sampled_from(LOOK_ALIKES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=10,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # two cores, shared
@given(st.dictionaries(st.text("xyz", min_size=1), plain_values, max_size=4))
@example({"x": "\x85"})
@example({"x": "a\u2028b"})
def test_dump_document_reads_back_equal_in_yaml_1_1_and_1_2(values: dict[str, Any]) -> None:
    text = dump_document(values)
    assert parse_document(text, "r.yaml").values == values
    assert (yaml.safe_load(text) or {}) == values
