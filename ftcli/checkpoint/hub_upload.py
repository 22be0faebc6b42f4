"""Upload an exported folder to a repository of models on the hub, with the client `huggingface_hub`.

All input is checked before anything is uploaded: the name, the token, the connection and the right to write. The token
is read by the client (HF_TOKEN, or the file of `hf auth login`); it is not an argument, and ftcli stores it nowhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ftcli.config.section import repository_problem
from ftcli.runtime.errors import InputError

# Files of weights that an earlier upload may have left. Without them a repository would hold weights of two exports.
WEIGHTS = ["model*.safetensors", "model*.safetensors.index.json", "adapter_model*.safetensors", "adapter_config.json"]


def check_target(name: str, key: str = "--push") -> None:
    """Check without a request whether an upload is possible: the name, the token and the offline mode.

    Args:
        name: Repository, as `owner/name` or `name`.
        key: The option or recipe key that named the repository, for messages.

    Raises:
        InputError: The name is wrong, there is no token, or HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import constants, get_token

    if problem := repository_problem(name):
        raise InputError(f"'{name}' is not the name of a repository, which {problem}", where=key)
    if constants.HF_HUB_OFFLINE:
        raise InputError("HF_HUB_OFFLINE is set, so nothing can be uploaded", where=key, hint="unset HF_HUB_OFFLINE")
    if get_token() is None:
        hint = "set HF_TOKEN to a token with write access, or log in with `hf auth login`"
        raise InputError(f"there is no token for {constants.ENDPOINT}", where=key, hint=hint)


def create_repository(name: str, *, private: bool, key: str = "--push") -> str:
    """Create a repository unless it exists. This proves the connection and the token before anything is uploaded.

    Args:
        name: Repository, as `owner/name` or `name`.
        private: Whether the repository must be private.
        key: The option or recipe key that named the repository, for messages.

    Returns:
        The name with its owner.

    Raises:
        InputError: The hub cannot be reached, refuses the token, or has a public repository of this name although
            `private` is set.
    """
    from huggingface_hub import HfApi

    check_target(name, key)
    with _explained(name, key):
        full_name = HfApi().create_repo(name, private=private or None, exist_ok=True).repo_id
        if private and not HfApi().repo_info(full_name).private:
            hint = "make it private in its settings, or choose another name"
            raise InputError(f"{full_name} exists and is public, but a private one is requested", where=key, hint=hint)
    return full_name


def upload(folder: Path, name: str, message: str, key: str = "--push") -> str:
    """Upload all files of a folder. Delete weight files of earlier uploads that this folder does not have.

    Args:
        folder: The folder.
        name: An existing repository, as `owner/name`.
        message: First line of the commit's message.
        key: The option or recipe key that named the repository, for messages.

    Returns:
        The address of the commit.

    Raises:
        InputError: The hub refuses the upload or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    with _explained(name, key):
        commit: Any = HfApi().upload_folder(
            repo_id=name, folder_path=folder, commit_message=message, delete_patterns=WEIGHTS
        )
    return str(commit.commit_url)


@contextmanager
def _explained(name: str, key: str) -> Iterator[None]:
    """Convert errors of the client inside the block into errors that say what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else 0
        reasons = {
            401: ("the hub does not accept the token", "set HF_TOKEN to a valid token with write access"),
            403: ("the token may not write to this repository", "use a token with write access, or your own namespace"),
            404: ("the hub has no such repository or owner", "check the name and the owner"),
        }
        reason, hint = reasons.get(code, (f"the hub answered {code}: {error.server_message or error}", "try again"))
        raise InputError(f"{name} was not uploaded: {reason}", where=key, hint=hint) from error
    except (HTTPError, ConnectionError, TimeoutError) as error:
        hint = "check the network and HF_ENDPOINT; `ftcli export RUN --push NAME` can be repeated at any time"
        reason = str(error) or type(error).__name__
        raise InputError(f"{constants.ENDPOINT} cannot be reached: {reason}", where=key, hint=hint) from error
