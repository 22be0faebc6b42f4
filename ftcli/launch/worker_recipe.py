"""Pass the recipe to the worker processes without writing credentials where others can read them.

Light: never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ftcli.config.trust import stored_form
from ftcli.launch.machines import Machines
from ftcli.runtime.redaction import redact
from ftcli.runtime.run_folder import RunFolder

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


@contextmanager
def recipe_for_workers(
    recipe: str | Path | Recipe, overrides: Sequence[str], config: Recipe, folder: RunFolder, machines: Machines
) -> Iterator[list[str]]:
    """Yield the arguments of the workers' command that name the recipe.

    Neither the run folder nor a command line may hold credentials. So a Recipe object or overrides with credentials are
    written to a file that only this user can read. The file is removed when the run ends.
    """
    from ftcli.config.load import dump_recipe

    file = recipe_file_for_workers(recipe, folder, machines)
    texts = list(overrides) if isinstance(recipe, str | Path) else [dump_recipe(config)]
    if redact(texts) == texts:
        yield [file, *(f"--set={item}" for item in overrides)]
        return
    with TemporaryDirectory(prefix="ftcli-") as private:
        path = Path(private) / "recipe.yaml"
        path.write_text(dump_recipe(config), encoding="utf-8")
        yield [str(path)]


def recipe_file_for_workers(recipe: str | Path | Recipe, folder: RunFolder, machines: Machines) -> str:
    """Return the path of the recipe for the workers, writing a Recipe object into the run folder."""
    from ftcli.config.load import dump_recipe, find_recipe

    if isinstance(recipe, str | Path):
        return str(find_recipe(recipe))
    folder.create()
    name = "recipe.yaml" if machines.rank == 0 else f"recipe-of-machine-{machines.rank}.yaml"
    folder.write_text(name, dump_recipe(stored_form(recipe)))
    if machines.rank == 0:
        folder.write_status("loading", 0, 0)  # so that a launch that fails at once does not block the next one
    return str(folder.path / name)
