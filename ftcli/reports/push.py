"""Export the weights of a run and upload them with a complete model card (`ftcli export --push`)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.checkpoint.hub_upload import check_target, create_repository, upload
from ftcli.data.revisions import is_on_hub
from ftcli.models.files import parse_json_object
from ftcli.runtime.log import log_line
from ftcli.runtime.reader_errors import missing_folder, user_path

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


def push(
    source: str | Path,
    name: str,
    directory: str | Path | None = None,
    *,
    private: bool = False,
    merge: bool = False,
    dtype: str | None = None,
    shard_size: str = "5GB",
    trust_remote_code: bool = False,
) -> str:
    """Export the weights of a run or of a checkpoint, verify them, and upload them to a repository of models.

    The name, the token, the connection and the right to write are checked first: the repository is created before the
    export begins. The token is read from HF_TOKEN or from the file of `hf auth login`.

    Args:
        source: A run folder or a checkpoint, as for `ftcli.export`.
        name: Repository, as `owner/name`, or `name` for the owner of the token.
        directory: Folder that keeps the export, new or empty. None: the export is deleted after the upload.
        private: Create a private repository, and refuse a public one that exists.
        merge: Whether to merge a LoRA adapter into its base model.
        dtype: float32, bfloat16 or float16; None keeps the dtype of training.
        shard_size: Largest size of a file, such as 5GB.
        trust_remote_code: Whether to run code of the task or the model. The stored recipe cannot enable it.

    Returns:
        The address of the commit.

    Raises:
        InputError: An argument is wrong, there is no token, or the hub refuses or cannot be reached.
        RuntimeError: The reloaded model differs from the trained one. Nothing was uploaded.

    Example:
        >>> ftcli.push("runs/my", "somebody/my-model", private=True)
    """
    path = user_path(source)
    if not path.exists():
        raise missing_folder(path)
    check_target(name)
    from ftcli.checkpoint.export import export, find_weights  # slow: imported after the checks above

    checkpoint = find_weights(path)[1]
    full_name = create_repository(name, private=private)
    with tempfile.TemporaryDirectory(prefix="ftcli-push-") as temporary:
        folder = export(
            checkpoint or path,
            Path(temporary) / "export" if directory is None else directory,
            merge=merge,
            dtype=dtype,
            shard_size=shard_size,
            trust_remote_code=trust_remote_code,
        )
        recipe, message = _complete(folder, path, checkpoint, trust_remote_code=trust_remote_code)
        with _base_of_recipe(folder / "adapter_config.json", recipe.model.name):
            address = upload(folder, full_name, message)
    log_line(f"{path} is uploaded: {address}")
    return address


@contextmanager
def _base_of_recipe(config: Path, name: str) -> Iterator[None]:
    """Let an adapter name a local base as the recipe does inside the block, and not by its place on this machine."""
    content = config.read_bytes() if config.is_file() else None
    settings = {} if content is None else parse_json_object(config, content)
    if content is None or is_on_hub(str(settings.get("base_model_name_or_path"))):
        yield
        return
    changed = settings | {"base_model_name_or_path": name}
    if not is_on_hub(name):
        changed = _of_local_base(settings, name)
    config.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
    try:
        yield
    finally:
        config.write_bytes(content)


def _of_local_base(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the settings of an adapter whose base is a local folder, after a warning."""
    log_line(
        f"warning: the base of the adapter is the local folder {name}, so others cannot load it: upload merged weights "
        "(--merge), or write the base's repository into base_model_name_or_path of adapter_config.json there"
    )
    is_plain = not name.startswith((".", "/", "~")) and ":" not in name  # it could be taken for a repository elsewhere
    return settings | {"base_model_name_or_path": f"./{name}" if is_plain else name}


def _complete(folder: Path, source: Path, checkpoint: Path | None, *, trust_remote_code: bool) -> tuple[Recipe, str]:
    """Complete the model card of an export; return the recipe, and the message of the commit."""
    from ftcli.checkpoint.folder import stored_recipe
    from ftcli.config.load import load_run_recipe
    from ftcli.config.trust import check_stored
    from ftcli.reports.run_card import complete_card
    from ftcli.runtime.run_folder import RunFolder

    if checkpoint is None:
        run, recipe = RunFolder(source), load_run_recipe(source, trust_remote_code=trust_remote_code)
        message = "Final weights"
    else:
        run = RunFolder(checkpoint.parent.parent)
        recipe = check_stored(stored_recipe(checkpoint), checkpoint, trusted=trust_remote_code)
        message = f"Weights of {checkpoint.name}"
    card = folder / "README.md"
    text = complete_card(card.read_text(encoding="utf-8"), recipe, run, checkpoint)
    card.write_text(text, encoding="utf-8")
    return recipe, f"{message} of {run.path.resolve().name}, by ftcli"
