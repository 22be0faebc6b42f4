"""Create the task of a recipe. Each file in this folder that defines `Options` and `Task` is a task of that name.

A user's task is `./my_task.py` or `package.module`. Finding a task imports its module only. The tasks of ftcli import
torch inside functions; a user's task may import it anywhere.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from ftcli.config.task_registry import check_methods, find_task, is_custom_task, recipe_problems
from ftcli.models.kernels.document_attention import check_attention
from ftcli.runtime.errors import InputError
from ftcli.runtime.opened_files import recording_creation

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.tasks.protocol import Task


def build_task(recipe: Recipe) -> Task:
    """Create the recipe's task and load its tokenizer or image processor.

    Args:
        recipe: The recipe of the run.

    Returns:
        The task.

    Raises:
        InputError: The task does not exist, `task_options` are invalid, or the model does not fit the recipe's data.
    """
    from ftcli.config.validation import validate

    module = find_task(recipe.task)
    options, problems = validate(module.Options, recipe.task_options, prefix=("task_options",))
    if problems := problems or [*recipe_problems(recipe, module.Task)]:
        raise InputError(problems)
    check_attention(recipe, module.Task)
    with recording_creation(recipe.task, module) if is_custom_task(recipe.task) else nullcontext():
        task: Task = module.Task(recipe, options)
    check_methods(recipe.task, task)
    return task
