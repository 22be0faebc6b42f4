"""Merge the encoded files of all sources of a split into one Arrow file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.data.encode import encoded_files

if TYPE_CHECKING:
    import pyarrow as pa

    from ftcli.data.mixture import SourceRows


def merge_sources(parts: dict[Path, SourceRows], path: Path) -> int:
    """Write the documents of a split into one file, and add the columns `id` and `source`.

    Args:
        parts: Folder of encoded files -> its source, in the order of the split.
        path: Path of the new file.

    Returns:
        The number of documents.
    """
    import numpy as np
    import pyarrow as pa

    tables = [(source, name) for source, folder in enumerate(parts) for name in encoded_files(folder)]
    schema = pa.unify_schemas([_schema(name) for _, name in tables], promote_options="permissive")
    full = schema.append(pa.field("source", pa.int64())).append(pa.field("id", pa.int64()))
    done = 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, full) as writer:
        for source, (folder, part) in enumerate(parts.items()):
            for number in range(part.passes):
                for name in encoded_files(folder):
                    table = _with_columns(_read(name), schema)
                    if number == part.passes - 1 and part.last is not None:
                        table = table.filter(pa.array(np.isin(table["row"].to_numpy(), part.last)))
                    table = table.append_column("source", pa.array(np.full(len(table), source)))
                    writer.write_table(table.append_column("id", pa.array(np.arange(done, done + len(table)))))
                    done += len(table)
    return done


def _schema(path: Path) -> pa.Schema:
    """Return the schema of an Arrow stream file."""
    import pyarrow as pa

    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
        return reader.schema


def _read(path: Path) -> pa.Table:
    """Return the table in an Arrow stream file."""
    import pyarrow as pa

    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
        return reader.read_all()


def _with_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with all columns of a schema; missing columns are null."""
    import pyarrow as pa

    for column in schema:
        if column.name not in table.column_names:
            table = table.append_column(column, pa.nulls(len(table), column.type))
    return table.select(schema.names).cast(schema)
