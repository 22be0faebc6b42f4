"""Build a `datasets.Dataset` from rows without changing a value.

Columns of one plain type become Arrow columns of that type. Every other column, such as messages, is stored as JSON.
Arrow and `datasets` would convert texts into dates and whole numbers into floats, and add a null for each key that
another row has. Rows are written to a temporary file, so that only a few are in memory.
"""

from __future__ import annotations

import json
import mmap
import tempfile
import uuid
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from typing import IO, TYPE_CHECKING, Any

from ftcli.runtime.patches import declare
from ftcli.runtime.resources import cache_root, writing_cache

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

    from ftcli.tasks.protocol import Row


BATCH = 1000  # unconverted rows in memory
SAMPLE_FIELDS = 256  # fields of a column that are checked first, to decide whether it may hold numbers
INTEGER = r"^(0|-?[1-9][0-9]*)$"
DECIMAL = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
TRUTH = ("True", "False")

COLUMN_TYPE = declare(
    __name__,
    "json-columns",
    library="datasets",
    versions=">=4.4,<5.3",
    purpose="Registers a column type with `datasets`, which stores the name of the type with a table",
    without="Rows cannot be prepared.",
    alternative="`datasets.Json`, which changes numbers, and is not in all tested versions.",
    apis=("datasets.features.features:register_feature", "datasets.features.features:Value._type"),
    required=True,
)


@dataclass
class JsonText:
    """Column type of `datasets`: values of any JSON type, stored as text."""

    _type: str = field(default="FtcliJsonText", init=False, repr=False)

    def __call__(self) -> pa.DataType:
        """Return the Arrow type of the column."""
        import pyarrow as pa

        return pa.string()

    def decode_example(self, stored: str, **_: Any) -> Any:
        """Return a stored value."""
        return json.loads(stored)


def build_dataset(rows: Iterable[Row]) -> Dataset:
    """Build a dataset whose values are exactly those of the rows.

    Args:
        rows: Rows with JSON values. A column that a row lacks is null there.

    Returns:
        The dataset, memory-mapped from a temporary file that is deleted with it.
    """
    from datasets import Dataset, DatasetInfo, Features

    _register()
    with tempfile.TemporaryFile(dir=_folder()) as file:
        segments = _write(file, iter(rows))
        if not segments:
            return Dataset.from_dict({})
        table = _unified(file, segments)
    known = Features.from_arrow_schema(table.schema)
    features = {name: JsonText() if kind is None else known[name] for name, kind in segments[-1].types.items()}
    return Dataset(table, info=DatasetInfo(features=Features(features)), fingerprint=uuid.uuid4().hex[:16])


def infer_numbers(rows: Dataset, text: Collection[str]) -> Dataset:
    """Convert the text columns of a table that contain only numbers or truth values.

    Args:
        rows: Rows of a .csv or .tsv file.
        text: Columns that always stay text.

    Returns:
        The rows. A column is converted only if different fields become different numbers, and if whole numbers and
        truth values are written as Python writes them.
    """
    from datasets import Dataset

    table = rows.data.table
    for place, name in enumerate(table.column_names):
        if name not in text:
            column = _as_numbers(table.column(name))
            table = table if column is None else table.set_column(place, name, column)
    return Dataset(table.replace_schema_metadata(None), fingerprint=uuid.uuid4().hex[:16])


def first_invalid_row(rows: Dataset) -> int | None:
    """Return the number, from 1, of the first row with text that is not UTF-8; None if all texts are valid.

    Parquet files may have such texts. Reading one of them raises an exception that does not name the row.
    """
    start = 0
    for batch in rows.data.table.to_batches():
        for number in () if _is_valid(batch) else range(batch.num_rows):
            try:
                batch.slice(number, 1).to_pylist()
            except UnicodeDecodeError:
                return start + number + 1
        start += batch.num_rows
    return None


def _is_valid(batch: pa.RecordBatch) -> bool:
    """Return whether the values of all columns are valid, which takes far less time than to read them."""
    import pyarrow as pa

    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _as_numbers(column: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Return a text column as whole numbers, truth values or floats; None if it stays text."""
    import pyarrow as pa
    from pyarrow import compute as pc

    if not pa.types.is_string(column.type) or column.null_count == len(column):
        return None

    def all_match(pattern: str) -> bool:
        head = column.slice(0, SAMPLE_FIELDS)
        return all(pc.all(pc.match_substring_regex(rows, pattern)).as_py() is not False for rows in (head, column))

    try:
        if all_match(INTEGER):
            return column.cast(pa.int64())
        if all_match(f"^({'|'.join(TRUTH)})$"):
            return pc.equal(column, TRUTH[0])
        if all_match(DECIMAL):
            numbers = column.cast(pa.float64())
            is_exact = len(pc.unique(numbers)) == len(pc.unique(column)) and pc.all(pc.is_finite(numbers)).as_py()
            return numbers if is_exact else None
    except pa.ArrowInvalid:  # a number of more than 64 bits
        return None
    return None


def _folder() -> str:
    """Return the folder for temporary files, which is created if it is missing."""
    folder = cache_root() / "rows"
    with writing_cache():
        folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


@cache
def _register() -> None:
    """Register `JsonText` with `datasets`, which stores the names of column types with a table."""
    COLUMN_TYPE.require()
    from datasets.features.features import register_feature

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the function is marked as experimental
        register_feature(JsonText, JsonText()._type)


@dataclass
class _Segment:
    """One Arrow stream in the temporary file, with the types of its columns; None for columns stored as JSON."""

    types: dict[str, pa.DataType | None]
    start: int
    end: int = 0


def _write(file: IO[bytes], rows: Iterator[Row]) -> list[_Segment]:
    """Write rows into an open file. A new Arrow stream begins when the type of a column changes."""
    import pyarrow as pa

    segments: list[_Segment] = []
    writer = None
    while batch := list(islice(rows, BATCH)):
        known = segments[-1].types if segments else {}
        names = dict.fromkeys(chain(known, *batch))
        columns = {name: [row.get(name) for row in batch] for name in names}
        types = {name: _unify(known.get(name, pa.null()), _type_of(values)) for name, values in columns.items()}
        table = pa.table({name: _array(values, types[name]) for name, values in columns.items()})
        if writer is None or types != known:
            if writer is not None:
                writer.close()
                segments[-1].end = file.tell()
            segments.append(_Segment(types, file.tell()))
            writer = pa.ipc.new_stream(file, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()
        segments[-1].end = file.tell()
    file.flush()
    return segments


def _type_of(values: list[Any]) -> pa.DataType | None:
    """Return the Arrow type that stores the values exactly; None if there is none."""
    import pyarrow as pa

    kinds = set(map(type, values)) - {type(None)}
    plain = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    if not kinds:
        return pa.null()
    if kinds == {list}:
        inner = {type(item) for value in values if value is not None for item in value} - {type(None)}
        if len(inner) > 1 or inner - set(plain):
            return None
        kind = pa.list_(plain[inner.pop()] if inner else pa.null())
    else:
        kind = plain.get(kinds.pop()) if len(kinds) == 1 else None  # beside 2.5, the value 3 must not become 3.0
    if kind is None or pa.string() == kind:
        return kind
    try:
        pa.array(values, kind)
    except (pa.ArrowInvalid, OverflowError):  # a whole number of more than 64 bits
        return None
    return kind


def _unify(one: pa.DataType | None, other: pa.DataType | None) -> pa.DataType | None:
    """Return the type that stores values of both types exactly; None if there is none."""
    import pyarrow as pa

    if one is None or other is None or one == other:
        return one if other is not None else None
    if pa.null() in (one, other):
        return other if one == pa.null() else one
    if pa.types.is_list(one) and pa.types.is_list(other) and pa.null() in (one.value_type, other.value_type):
        return other if one.value_type == pa.null() else one
    return None


def _array(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    """Return values as an Arrow array of a type; as JSON text if the type is None."""
    import pyarrow as pa

    if kind is not None:
        return pa.array(values, kind)
    dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    return pa.array([None if value is None else dump(value) for value in values], pa.string())


def _unified(file: IO[bytes], segments: list[_Segment]) -> pa.Table:
    """Return all segments of a memory-mapped file as one table with the types of the last segment."""
    import pyarrow as pa

    buffer = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    types = segments[-1].types
    tables = []
    for segment in segments:
        table = pa.ipc.open_stream(buffer.slice(segment.start, segment.end - segment.start)).read_all()
        columns = {
            name: pa.chunked_array([pa.nulls(len(table), kind or pa.string())])
            if name not in segment.types
            else table.column(name)
            if kind == segment.types[name]
            else pa.chunked_array([_array(table.column(name).to_pylist(), kind)])
            for name, kind in types.items()
        }
        tables.append(pa.table(columns))
    return pa.concat_tables(tables)
