"""Lines of files as rows: each keeps its number whatever is wrong with another, wherever the file is."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import socket
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest

from ftcli.data import text_files
from ftcli.data.streaming import line_reader
from ftcli.data.streaming.line_reader import read_lines, text_rows
from ftcli.data.streaming.remote_files import list_address
from ftcli.runtime.errors import InputError, RowError, RunError

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
}


def rows_or_messages(rows: Iterator[Any]) -> list[Any]:
    return [str(row) if isinstance(row, RowError) else row for row in rows]


def test_read_lines_with_an_invalid_line_raises_at_that_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LONGEST_LINE", 64)
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"n": 0}\r\n\n  \n{"n": \n{"t": "\xff"}\n[1]\n{"t": "'
        + b"x" * 500
        + b'"}\n{"t": "\\ud800"}\n{"t": "\\ud83d\\ude00"}\n'
        + b"[" * 60
        + b'\n{"n": 9}'
    )
    expected = [
        {"n": 0},
        "is not JSON: Expecting value",
        "is not UTF-8 text",
        "is not a JSON object",
        "is longer than 0 MiB",
        "contains half of a surrogate pair, which is not valid text",
        {"t": "\U0001f600"},
        "is not JSON: Expecting value",
        {"n": 9},
    ]
    assert rows_or_messages(read_lines(str(path), 0)) == expected
    for skip in range(11):
        assert rows_or_messages(read_lines(str(path), skip)) == expected[skip:]


def test_read_lines_of_an_empty_line_of_text_counts_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\ntwo\xff\nthree")
    assert rows_or_messages(read_lines(str(tmp_path / "a.txt"), 0)) == [
        {"text": "one"},
        "is empty",
        "is not UTF-8 text",
        {"text": "three"},
    ]


def test_text_with_single_carriage_returns_has_the_same_lines_as_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\rtwo\r\rthree\r\nfour\r")
    assert [row["text"] for row in text_rows(path)] == ["one", "two", "three", "four"]
    expected = [{"text": "one"}, {"text": "two"}, "is empty", {"text": "three"}, {"text": "four"}]
    for skip in range(6):
        assert rows_or_messages(read_lines(str(path), skip)) == expected[skip:]


def test_text_of_16_bits_without_a_mark_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("one\ntwo\n".encode("utf-16-le"))
    with pytest.raises(InputError, match="row 1 has a NUL for every few characters: is it UTF-16 text"):
        list(text_rows(path))
    path.write_bytes(b"a long line with one \0 in it\n")
    assert [row["text"] for row in text_rows(path)] == ["a long line with one \0 in it"]


TABLE = b'\xef\xbb\xbfprompt,completion,x\r\n1,"NULL, ""a""\r\nb",\n\n  \n02,\n3,a,b,c\n"4"x,a\n5,\xff,\n6,"open\n7,a\n'


@pytest.mark.parametrize(
    ("suffix", "mark"), [(".csv", ","), (".csv", ";"), (".csv", "|"), (".csv", "\t"), (".tsv", "\t")]
)
def test_read_lines_of_a_table_gives_text_and_names_what_is_no_row(suffix: str, mark: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}.gz"
    path.write_bytes(gzip.compress(TABLE.replace(b",", mark.encode())))
    quotes = 'a field that begins with a quote ends with one, and a quote in it is written ""'
    expected = [
        {"prompt": "1", "completion": f'NULL{mark} "a"\r\nb', "x": None},
        {"prompt": "02", "completion": None, "x": None},
        "has 4 fields, and the header has 3: a field with the separator in it needs quotes",
        f"is not a row of a table: '{mark}' expected after '\"'; {quotes}",
        "is not UTF-8 text",
        f"is not a row of a table: unexpected end of data; {quotes}",
    ]
    rows = list(read_lines(str(path), 0))
    assert rows_or_messages(iter(rows)) == expected
    assert [row.line for row in rows if isinstance(row, text_files.UnreadableRow)] == [7, 8, 9, 10]
    assert rows_or_messages(read_lines(str(path), 3)) == expected[3:]


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_files_of_several_parts_are_read_to_their_end(tmp_path: Path, suffix: str) -> None:
    pack = PACKERS[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(b'{"n": 0}\n{"n": 1}\n') + pack(b'{"n": 2}\n'))
    assert [row["n"] for row in read_lines(str(path), 1) if isinstance(row, dict)] == [1, 2]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("missing", [1, 10])
def test_read_lines_of_a_truncated_compressed_file_is_refused(tmp_path: Path, suffix: str, missing: int) -> None:
    lines = b"".join(b'{"n": %d}\n' % number for number in range(1000))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACKERS[suffix](lines) + PACKERS[suffix](b'{"n": 1000}\n')[:-missing])
    with pytest.raises(InputError, match="is truncated"):
        rows_or_messages(read_lines(str(path), 0))


def test_read_lines_with_a_file_of_another_size_is_another_file(tmp_path: Path) -> None:
    import fsspec

    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 0}\n')
    with fsspec.open("memory://lines/a.jsonl", "wb") as file:
        file.write(path.read_bytes())
    for name in (str(path), "memory://lines/a.jsonl"):
        assert rows_or_messages(read_lines(name, 0, size=9)) == [{"n": 0}]
        with pytest.raises(RunError, match="a.jsonl has 9 bytes and had 10 when the run began"):
            list(read_lines(name, 0, size=10))


class Breaks(BaseHTTPRequestHandler):
    """Serves ten rows, but only the first few of them as often as `breaks` says; knows no ranges."""

    body = b"".join(json.dumps({"n": n}).encode() + b"\n" for n in range(10))
    breaks = 0
    requests = 0
    has_length = True
    versions: dict[str, list[str]] = {}  # header -> its value in each answer; the last one stays

    def do_HEAD(self) -> None:
        self.answer(has_length=True)

    def answer(self, *, has_length: bool) -> None:
        (self.send_response_only if "Date" in self.versions else self.send_response)(200)
        if has_length:
            self.send_header("Content-Length", str(len(self.body)))
        for name, values in self.versions.items():
            self.send_header(name, values[min(self.requests, len(values) - 1)])
        self.end_headers()

    def do_GET(self) -> None:
        self.answer(has_length=self.has_length)
        type(self).requests += 1
        if self.requests <= self.breaks:
            self.wfile.write(self.body[:30])
            self.close_connection = True
            return
        self.wfile.write(self.body)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    pytest.importorskip("aiohttp")
    server = HTTPServer(("127.0.0.1", 0), Breaks)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/a.jsonl"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("breaks", "expected"), [(0, 1), (2, 3)])
def test_read_lines_of_a_broken_connection_continues_where_it_stopped(
    address: str, monkeypatch: pytest.MonkeyPatch, breaks: int, expected: int
) -> None:
    monkeypatch.setattr(line_reader, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(Breaks, "breaks", breaks)
    monkeypatch.setattr(Breaks, "requests", 0)
    assert rows_or_messages(read_lines(address, 0)) == [{"n": n} for n in range(10)]
    assert Breaks.requests == expected


def test_answer_that_ends_early_without_a_length_continues_where_it_stopped(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_reader, "FIRST_WAIT", 0.001)
    for name, value in {"breaks": 2, "requests": 0, "has_length": False}.items():
        monkeypatch.setattr(Breaks, name, value)
    size = len(Breaks.body)
    assert rows_or_messages(read_lines(address, 0, size=size)) == [{"n": n} for n in range(10)]
    assert Breaks.requests == 3
    monkeypatch.setattr(Breaks, "breaks", 99)
    with pytest.raises(ConnectionError, match=f"a.jsonl ended after 30 of {size} bytes"):
        list(read_lines(address, 0, size=size))


@pytest.mark.parametrize(
    ("versions", "is_replaced"),
    [
        ({"ETag": ["a", "b"]}, True),
        ({"Last-Modified": ["Mon, 01 Jan 2024 00:00:00 GMT", "Tue, 02 Jan 2024 00:00:00 GMT"]}, True),
        ({"Last-Modified": ["Mon, 01 Jan 2024 00:00:00 GMT"], "ETag": ["of server 1", "of server 2"]}, False),
        ({"ETag": ["a"]}, False),
        ({"ETag": ["a", "W/a"]}, False),
        ({"Last-Modified": ["Mon, 01 Jan 2024 00:00:00 GMT", "Tue, 02 Jan 2024 00:00:00 GMT"], "ETag": ["a"]}, False),
        # The time of the answer, which was slow. A file that was uploaded just before the first answer, and replaced.
        ({"Last-Modified": [-1, -2]}, False),
        ({"Last-Modified": [1, 0]}, False),
        ({"Last-Modified": [-86400, -5]}, True),
        # The clock of the storage is ahead of the server's, and the second answer comes ten minutes later.
        ({"Last-Modified": [50, 50], "Date": [0, 600]}, False),
        ({"Last-Modified": [0, 3600]}, True),
        ({"Last-Modified": [0, -3600]}, False),
        ({"Last-Modified": ["never", "Tue, 02 Jan 2024 00:00:00 GMT"]}, False),
    ],
)
def test_rest_of_a_file_that_was_replaced_meanwhile_is_refused(
    versions: dict[str, list[Any]], is_replaced: bool, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = lambda seconds: formatdate(time.time() + seconds, usegmt=True)  # noqa: E731
    versions = {name: [at(v) if isinstance(v, int) else v for v in values] for name, values in versions.items()}
    monkeypatch.setattr(line_reader, "FIRST_WAIT", 0.001)
    for name, value in {"breaks": 1, "requests": 0, "versions": versions}.items():
        monkeypatch.setattr(Breaks, name, value)
    reading = read_lines(address, 0)
    if is_replaced:
        with pytest.raises(RunError, match="was replaced since the run began: a stream's files must not change"):
            list(reading)
        list_address(address, list)  # as the next run does
    assert rows_or_messages(read_lines(address, 0)) == [{"n": n} for n in range(10)]


@pytest.mark.skipif(find_spec("aiohttp") is None, reason="needs aiohttp")
def test_list_address_of_a_closed_port_says_why() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(InputError, match="cannot be read: connect call failed"):
        list_address(f"http://127.0.0.1:{port}/a.jsonl", list)


def test_read_lines_of_an_address_without_data_ends_with_an_error(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_reader, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(Breaks, "breaks", 99)
    monkeypatch.setattr(Breaks, "requests", 0)
    with pytest.raises(Exception, match="payload"):
        list(read_lines(address, 0))
    assert Breaks.requests > line_reader.RETRIES


def test_file_that_grows_while_it_is_read_ends_with_an_error_before_a_new_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = "".join(json.dumps({"n": number}) + "\n" for number in range(3))
    path.write_text(lines)
    found = read_lines(str(path), 0, size=len(lines))
    assert next(found) == {"n": 0}
    with path.open("a") as file:
        file.write('{"n": 3}\n')
    assert [next(found), next(found)] == [{"n": 1}, {"n": 2}]
    with pytest.raises(RunError, match=f"has {len(lines) + 9} bytes and had {len(lines)} when the run began"):
        next(found)
