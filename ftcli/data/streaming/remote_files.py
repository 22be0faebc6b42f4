"""List the files behind an address (https://, s3://, hf://), with their sizes.

All access goes through fsspec, which reads credentials and endpoints from the environment. This module does not read
the content of the files.
"""

from __future__ import annotations

import glob
from collections.abc import Callable
from typing import Any

from ftcli.data.streaming.line_reader import forget_versions, suffix_of
from ftcli.runtime.errors import InputError
from ftcli.runtime.reader_errors import reason
from ftcli.runtime.redaction import is_redacted

WEB = ("http://", "https://")
PACKAGES = {  # protocol -> package to install; {} is the version of fsspec, which must be equal
    "s3": "s3fs=={}",
    "s3a": "s3fs=={}",
    "gs": "gcsfs=={}",
    "gcs": "gcsfs=={}",
    "http": "aiohttp",
    "https": "aiohttp",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}


def is_address(name: str) -> bool:
    """Return whether a name has a protocol."""
    return "://" in name


def is_pattern(address: str) -> bool:
    """Return whether an address is a pattern. For http(s), a question mark begins a query and is no pattern."""
    return "*" in address.partition("?")[0] if address.startswith(WEB) else glob.has_magic(address)


def is_folder(address: str) -> bool:
    """Return whether an address is treated as a folder: it has no suffix. http(s) addresses are never folders."""
    return not suffix_of(address) and not address.startswith(WEB)


def file_system(address: str) -> Any:
    """Return fsspec's file system for an address.

    Args:
        address: Address of a file, pattern or folder.

    Raises:
        InputError: The package for the protocol is not installed, the protocol is unknown, or the credentials of the
            address were removed when the run was stored.
    """
    import fsspec

    if is_redacted(address):
        raise InputError(
            f"{address} cannot be read: its credentials were not stored with the run",
            hint="use the original recipe, or set credentials in the environment instead of the address",
        )
    protocol = address.partition("://")[0]
    try:
        return fsspec.filesystem(protocol)
    except ImportError as error:
        package = PACKAGES.get(protocol)
        hint = f"pip install {package.format(fsspec.__version__)}" if package else "install the package that it names"
        raise InputError(f"data.train: {protocol}:// cannot be read: {error}", hint=hint) from error
    except ValueError as error:
        raise InputError(f"data.train: {address}: unknown protocol {protocol}://") from error


def is_visible(file: str, folder: str) -> bool:
    """Return whether neither a file nor a folder between it and the folder that a user named is hidden.

    Args:
        file: Path or address of the file.
        folder: Path or address of the folder, which may be hidden itself.
    """
    count = lambda name: sum(part.startswith(".") and part.strip(".") != "" for part in name.split("/"))  # noqa: E731
    return count(file) <= count(folder)


def list_address(address: str, data_files: Callable[[list[str]], list[str]]) -> tuple[list[str], list[int | None]]:
    """List the files behind an address, sorted by name.

    Args:
        address: Address of a file, pattern or folder.
        data_files: Selects the data files of a folder from its visible files.

    Returns:
        (files, their sizes in bytes). A size is None if the server does not send it.

    Raises:
        InputError: The address cannot be listed, or there is no file.
    """
    system, protocol = file_system(address), address.partition("://")[0]
    from fsspec.core import url_to_fs

    forget_versions()
    try:
        root = url_to_fs(address)[1]  # an absolute path, as those that are listed
        if is_pattern(address) or is_folder(address):
            found = system.glob(address, detail=True) if is_pattern(address) else system.find(address, detail=True)
            visible = [file for file in found if is_visible(file, root)]
            listed = {file: found[file] for file in (visible if is_pattern(address) else data_files(visible))}
        else:
            listed = {address: system.info(address)}
        sizes = {
            file if is_address(file) else f"{protocol}://{file}": info.get("size") for file, info in listed.items()
        }
        files = sorted(sizes)
        known = [system.info(file).get("size") if sizes[file] is None else sizes[file] for file in files]
    except InputError:
        raise
    except Exception as error:  # each file system has its own exceptions
        cause = reason(error.__cause__ or error)
        hint = "check the address and the credentials in the environment"
        raise InputError(f"data.train: {address} cannot be read: {cause}", hint=hint) from error
    if not files:
        raise InputError(f"data.train: no file matches {address}", hint="check the address and the names of its files")
    return files, known
