"""Text files of a data set on the hub are trained as they are written, with and without a network.

The hub is a server on this machine; it is read by processes of their own, because libraries read the
environment when they are imported.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from ..support.hub import Hub, serving

ROOT = Path(__file__).resolve().parents[2]
OLDER = "e" * 40
# Texts that readers of tables and JSON take for something else.
TAKEN = ["NULL", "NA", "None", "nan", "007", "2026-01-01", "2026-01-01 10:00:00", "1e5", "1.50", "True"]
ROWS = [{"prompt": text, "completion": text} for text in TAKEN]
TABLE = "prompt{0}completion\n" + "".join(f"{text}{{0}}{text}\n" for text in TAKEN)
FILES = {
    "csv": {"train.csv": TABLE.format(",").encode()},
    "tsv": {"train.tsv": TABLE.format("\t").encode()},
    "jsonl": {"data/train-0.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode()},
    "json": {"train.json": json.dumps(ROWS).encode()},
    "ndjson": {"train.ndjson": "".join(json.dumps(row) + "\n" for row in ROWS).encode()},
    "field": {
        "README.md": b"---\nconfigs:\n- config_name: default\n  data_files: train.json\n  field: rows\n---\n",
        "train.json": json.dumps({"version": 3, "rows": ROWS}).encode(),
    },
    "separator": {
        "README.md": b'---\nconfigs:\n- config_name: default\n  data_files: train.csv\n  sep: "#"\n---\n',
        "train.csv": TABLE.format("#").encode(),
    },
}
READ = """
import json, sys
from ftcli.data.streaming.corpus import open_source
from ftcli.runtime.errors import InputError
from ftcli.config.recipe_data import Source
from ftcli.data.sources import read_rows
for source in json.loads(sys.argv[1]):
    streams = source.pop("stream", False)
    try:
        if streams:
            corpus = open_source(Source(**source), {})
            rows = [row for file in range(len(corpus.sizes)) for row in corpus.read(file, 0)]
        else:
            rows = list(read_rows(Source(**source), {}, ["prompt", "completion"]))
        print(json.dumps(rows, default=str))
    except InputError as error:
        print(json.dumps(str(error)))
"""


def read(folder: Path, *sources: dict[str, Any], hub: Hub | None = None) -> list[Any]:
    """Return the rows of each source, or an error's text, as a separate process reads them."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_CACHE"}
    environment |= {"PYTHONPATH": str(ROOT), "FTCLI_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "home")}
    environment |= {"HF_HUB_OFFLINE": "1"} if hub is None else hub.environment(str(folder / "home"))
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(sources)], capture_output=True, text=True, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "stderr").write_text(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_read_rows_of_text_files_on_the_hub_are_those_of_the_files(tmp_path: Path) -> None:
    hubs = {kind: Hub(f"org/{kind}", files) for kind, files in FILES.items()}
    for hub in hubs.values():
        hub.history[OLDER] = {name: content.replace(b"NULL", b"Null") for name, content in hub.files.items()}
    newest: list[dict[str, Any]] = [{"path": hub.name} for hub in hubs.values()]
    older = [source | {"revision": OLDER} for source in newest]
    sources = [*newest, *(source | {"stream": True} for source in newest), *older]
    sources += [{"path": "org/jsonl", "split": "test"}, {"path": "org/jsonl", "name": "nothing"}]
    table = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(ROWS), table)
    hubs["parquet"] = Hub("org/parquet", {"train.parquet": table.getvalue()})  # through `datasets`, which changes none
    sources = [{"path": "org/parquet"}, *sources]
    with serving(*hubs.values()) as hub:
        online = read(tmp_path, *sources, hub=hub)
        counts = [len(each.requests) for each in hubs.values()]
    before = [{**ROWS[0], "prompt": "Null", "completion": "Null"}, *ROWS[1:]]
    assert online[:-2] == [ROWS] + [ROWS] * len(newest) * 2 + [before] * len(newest)
    assert "data set org/jsonl has no split 'test'" in online[-2] and "its splits: train" in online[-2]
    assert "data set org/jsonl: BuilderConfig 'nothing' not found" in online[-1]
    assert read(tmp_path, *sources[:-2]) == online[:-2]
    assert [len(each.requests) for each in hubs.values()] == counts
    assert "through the library datasets" not in (tmp_path / "stderr").read_text()
