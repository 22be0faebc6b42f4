"""Compute data fingerprints: digests that identify the rows a run trains and evaluates on.

Fingerprints are compared when a run resumes. They depend on the values and the order of the prepared rows, not on
paths, library versions or the layout of files. The cache key of prepared rows is different; see cache_key.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from ftcli.config.recipe import Recipe
    from ftcli.config.recipe_data import Source
    from ftcli.tasks.protocol import Task


FORMULA = "rows-1"  # written into state.json; change it whenever the same rows would get another fingerprint
UNTRAINED_COLUMNS = ("row", "id")  # the number of the raw row, for messages, and the position in the file
FILE_CHUNK = 1 << 20  # bytes of a file that are hashed at a time

# Keys in the formula of 2f09857. It does not include keys that were added to the recipe later.
LEGACY_DATA = (
    *("train", "eval", "eval_rows", "columns", "drop_last", "max_length", "chat_template_kwargs", "truncation"),
    "max_bad_rows",
)
LEGACY_SOURCE = ("path", "name", "split", "revision", "label", "columns", "max_rows", "weight")
LEGACY_FORMAT = 4


def fingerprint(digests: dict[str, str], facts: dict[str, Any], stream: Any = None) -> str:
    """Return the data fingerprint of a run's rows.

    Args:
        digests: Split -> `digest_rows` of its prepared rows. For a stream, "train" is the digest of its first rows.
        facts: Values that the task has read from all training rows, such as label names.
        stream: Identifier of a streamed source (`corpus.stream_content`); None for prepared rows.

    Returns:
        32 hexadecimal digits.
    """
    parts = {"formula": FORMULA, "rows": digests, "facts": facts} | ({} if stream is None else {"stream": stream})
    return _short(json.dumps(parts, sort_keys=True))


def digest_rows(path: Path, file_columns: Sequence[str] = ()) -> str:
    """Return a digest of the values in an Arrow file of prepared rows, in their order.

    Args:
        path: Arrow stream file.
        file_columns: Columns with paths of files that are read when a batch is made. The digest includes the contents
            of these files, not their paths.

    Returns:
        32 hexadecimal digits. They do not depend on record batches or on the width of numbers.
    """
    import pyarrow as pa

    hashes: dict[str, Any] = {}
    rows = 0
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
        for batch in reader:
            rows += len(batch)
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                if name in file_columns:
                    _add(hashes, name, pa.array(_file_digests(column.to_pylist()), type=pa.string()))
                elif name not in UNTRAINED_COLUMNS:
                    _add(hashes, name, column)
    digests = {name: digest.hexdigest() for name, digest in hashes.items()}
    return _short(json.dumps([rows, digests], sort_keys=True))


def file_digest(path: Path) -> str:
    """Return a digest of all bytes of a file."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(FILE_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _add(hashes: dict[str, Any], name: str, column: pa.Array) -> None:
    """Add one column to its digests: one for the values, and one each for nulls and lengths."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    _update(hashes, f"{name} is there", column.is_valid().cast(pa.uint8()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        _update(hashes, f"{name} length", pc.list_value_length(column).fill_null(0).cast(pa.int64()))
        _add(hashes, f"{name}[]", column.flatten())
    elif pa.types.is_struct(kind):
        for field, values in zip(kind, column.flatten(), strict=True):
            _add(hashes, f"{name}.{field.name}", values)
    elif pa.types.is_boolean(kind):
        _update(hashes, name, column.fill_null(False).cast(pa.uint8()))
    elif pa.types.is_integer(kind) and kind != pa.uint64():
        _update(hashes, name, column.fill_null(0).cast(pa.int64()))
    elif pa.types.is_floating(kind):
        _update(hashes, name, column.fill_null(0).cast(pa.float64()))
    elif not pa.types.is_null(kind):
        texts = column.to_pylist()
        contents = [text if isinstance(text, bytes) else str(text).encode(errors="surrogatepass") for text in texts]
        _update(hashes, f"{name} length", pa.array([len(content) for content in contents], type=pa.int64()))
        _hash_of(hashes, name).update(b"".join(contents))


def _update(hashes: dict[str, Any], name: str, column: pa.Array) -> None:
    """Add a column of numbers without nulls to a digest."""
    _hash_of(hashes, name).update(column.to_numpy(zero_copy_only=False).tobytes())


def _hash_of(hashes: dict[str, Any], name: str) -> Any:
    """Return the hash of a name, which is created if it is missing."""
    return hashes.setdefault(name, hashlib.blake2b(digest_size=16))


def _file_digests(paths: list[str | None]) -> list[str | None]:
    """Return the digest of each file; None for None."""
    with ThreadPoolExecutor() as pool:  # hashing releases Python's lock
        return list(pool.map(lambda path: None if path is None else file_digest(Path(path)), paths))


def legacy_fingerprints(recipe: Recipe, task: Task) -> list[str]:
    """Return the fingerprints that ftcli at 2f09857 may have stored for a recipe: its cache key at that time.

    A tokenizer whose file sets truncation or padding loses both when it first encodes. The old fingerprint contained
    these settings, so two fingerprints are possible.

    Args:
        recipe: The recipe as the user wrote it, without resolved commits.
        task: The recipe's task.

    Returns:
        One or two fingerprints. A checkpoint without the name of a formula has one of them.
    """
    from ftcli.data.tokenizer_files import with_file_settings

    streams = recipe.data.streaming
    settings = recipe.data.model_dump(include=set(LEGACY_DATA))
    if not settings["chat_template_kwargs"]:
        del settings["chat_template_kwargs"]
    if streams:
        settings["max_bad_rows"] = 0
    for key in ("train", "eval"):
        settings[key] = _legacy_settings(settings[key])
    parts = {
        "format": LEGACY_FORMAT,
        "data": settings | {"task": recipe.task, "options": recipe.task_options, "seed": recipe.seed},
        "train": [_legacy_stream(each) if streams else _legacy_content(each) for each in recipe.data.train_sources],
        "eval": [_legacy_content(each) for each in recipe.data.eval_sources],
    }
    texts = [task.fingerprint()]
    if (tokenizer := getattr(task, "tokenizer", None)) is not None:
        with with_file_settings(tokenizer):
            texts.append(task.fingerprint())
    return [_short(json.dumps(parts | {"task": text}, sort_keys=True), hashlib.sha256) for text in dict.fromkeys(texts)]


def _legacy_settings(sources: Any) -> Any:
    """Return the settings of one source or several without keys that were added later."""
    if isinstance(sources, list):
        return [_legacy_settings(source) for source in sources]
    return None if sources is None else {key: sources[key] for key in LEGACY_SOURCE}


def _legacy_content(source: Source) -> Any:
    """Return the identifier of a source with prepared rows in the old formula."""
    from ftcli.data.image_folders import image_files
    from ftcli.data.paths import local_path

    path = local_path(source.path)
    if path is None:
        return [source.path, source.name, source.split, source.revision]
    if path.is_dir():
        files = [file for file, _ in image_files(path)]
        listing = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    return file_digest(path)


def _legacy_stream(source: Source) -> Any:
    """Return the identifier of a stream in the old formula: names and sizes of its files, or a commit."""
    from ftcli.data.hub_streams import source_commit
    from ftcli.data.streaming.source_files import list_files

    content = list_files(source) or source_commit(source)
    return ["stream", source.path, source.name, source.split, source.revision, content]


def _short(text: str, algorithm: Callable[..., Any] = hashlib.blake2b) -> str:
    """Return the first 32 hexadecimal digits of a hash of a text."""
    return str(algorithm(text.encode()).hexdigest())[:32]
