"""Declare the recipe: all settings that may affect the loss, and a few machine hints that do not.

Every key is declared once, with bounds, unit and description. The JSON schema, docs/reference/recipe.md and all error
messages are generated from these declarations. The sections are in recipe_model.py, recipe_data.py and
recipe_training.py, and other modules import them from here. This module also checks the rules between sections. Light:
never imports torch.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from ftcli.config.recipe_data import Data, Source
from ftcli.config.recipe_model import NO_MODEL, Adapter, Model, Quantization
from ftcli.config.recipe_training import (
    ANSWER_METRICS,
    Batch,
    Best,
    Checkpoint,
    Evaluate,
    Faults,
    Generate,
    Hub,
    Log,
    Message,
    Optimizer,
    Schedule,
    Train,
)
from ftcli.config.section import MACHINE_HINT, PathText, Section

__all__ = [
    "ANSWER_METRICS",
    "MACHINE_HINT",
    "NO_MODEL",
    "Adapter",
    "Batch",
    "Best",
    "Checkpoint",
    "Data",
    "Evaluate",
    "Faults",
    "Generate",
    "Hub",
    "Log",
    "Message",
    "Model",
    "Optimizer",
    "Quantization",
    "Recipe",
    "Schedule",
    "Section",
    "Source",
    "Train",
]


class Recipe(Section):
    """One training run: model, data and method. The profile describes the hardware."""

    task: PathText = Field(
        min_length=1,
        description="One of `ftcli show tasks`, ./my_task.py, or package.module.",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seeds weights, data order and dropout.")
    precision: Literal["fp32", "bf16", "fp16", "bf16_pure", "fp8"] = Field(
        "fp32",
        description="Dtype of the forward and backward pass. Weights, optimizer state and gradient sums are float32, "
        "except under bf16_pure: weights, gradients and one moment are then bfloat16, and the lower bits of each "
        "weight are stored separately, so that no update is lost (12 bytes per element instead of 16). fp16 scales "
        "the loss and skips steps with an overflow in the gradient; which steps these are depends on batch.micro_size "
        "and the number of processes, so prefer bf16, which does not overflow. fp8 is bf16 with the products of linear "
        "layers in 8-bit floats (torchao; GPUs from compute capability 8.9; fast with model.torch_compile).",
    )
    output: PathText | None = Field(
        None, min_length=1, description="Run folder; absent: runs/<file name of the recipe>."
    )
    model: Model = Field(description="The model, and how it is loaded and run.")
    adapter: Adapter = Field(default_factory=Adapter, description="Train a small adapter instead of the whole model.")
    data: Data = Field(description="The training and evaluation rows.")
    task_options: dict[str, Any] = Field(
        default_factory=dict, description="Keys that the task itself declares (`ftcli show tasks`)."
    )
    batch: Batch = Field(description="Rows per optimizer step.")
    train: Train = Field(description="How long training lasts.")
    optimizer: Optimizer = Field(description="The optimizer and gradient clipping.")
    schedule: Schedule = Field(default_factory=Schedule, description="Learning rate as a function of the step.")
    evaluate: Evaluate = Field(default_factory=Evaluate, description="When the model is evaluated.")
    checkpoint: Checkpoint = Field(
        default_factory=Checkpoint, description="When checkpoints are saved, and how many are kept."
    )
    faults: Faults = Field(
        default_factory=Faults,
        description="What happens after a step with a non-finite loss or gradient, and to tensors without a gradient.",
    )
    log: Log = Field(default_factory=Log, description="Where and how often metrics are written.")
    hub: Hub = Field(default_factory=Hub, description="Where the trained weights are uploaded.")

    @model_validator(mode="before")
    @classmethod
    def _allow_recipe_without_model(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(task := values.get("task"), str):
            return values
        model = values.get("model", {})
        if isinstance(model, dict) and "name" not in model and _may_build_its_model(task):
            return values | {"model": {"name": NO_MODEL} | model}
        return values

    @model_validator(mode="after")
    def _check_keep_best(self) -> Recipe:
        best = self.checkpoint.keep_best
        if best is None or self.data.eval is not None or self.data.eval_rows:
            return self
        if self.evaluate.generate is None or best.metric not in ANSWER_METRICS:
            raise ValueError("checkpoint.keep_best needs evaluation rows: set data.eval or data.eval_rows")
        return self

    @model_validator(mode="after")
    def _check_faults(self) -> Recipe:
        policy = self.faults.non_finite
        if policy == "skip" and (mode := self.model.batch_norm) != "frozen":
            raise ValueError(f"faults.non_finite: skip cannot undo what a step did to batch_norm: {mode}; use rollback")
        if policy == "rollback" and self.checkpoint.every_steps is None:
            raise ValueError("faults.non_finite: rollback needs checkpoints: set checkpoint.every_steps")
        return self

    @model_validator(mode="after")
    def _check_streaming(self) -> Recipe:
        if self.data.streaming and self.train.max_steps is None:
            raise ValueError("data.streaming needs train.max_steps: the number of rows of an epoch is not known")
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> Recipe:
        if self.model.quantization is not None and self.adapter.type == "none":
            raise ValueError("model.quantization: weights in 4 bits cannot be trained: set adapter.type: lora")
        return self

    @model_validator(mode="after")
    def _check_optimizer_precision(self) -> Recipe:
        if self.optimizer.name != "adamw" and self.precision == "bf16_pure":
            name = self.optimizer.name
            raise ValueError(f"optimizer.name: {name} needs float32 weights: set precision to bf16, or name to adamw")
        return self

    @model_validator(mode="after")
    def _check_batch_norm(self) -> Recipe:
        mode = self.model.batch_norm
        if mode != "frozen" and not self.data.drop_last:
            message = f"data.drop_last: false pads the last step, and batch_norm: {mode} would count the padding"
            raise ValueError(message)
        recomputed = self.model.gradient_checkpointing
        if mode != "frozen" and recomputed not in ("auto", "none"):
            raise ValueError(f"{counted_twice(recomputed, mode)}: {COUNT_ONCE}")
        if mode != "frozen" and self.adapter.type != "none" and not self.adapter.modules_to_save:
            raise ValueError(
                f"model.batch_norm: {mode} updates running statistics, which an adapter does not hold: set it to "
                "frozen, or name all batch norms in adapter.modules_to_save"
            )
        return self

    @model_validator(mode="after")
    def _check_cuda_graphs(self) -> Recipe:
        from ftcli.config.graph_exclusions import graph_exclusion

        if self.model.cuda_graphs and (other := graph_exclusion(self)) is not None:
            raise ValueError(f"model.cuda_graphs cannot be combined with {other}: change one of them")
        return self


COUNT_ONCE = "set gradient_checkpointing to none or auto, or batch_norm to frozen"


def counted_twice(recomputed: str, batch_norm: str) -> str:
    """Return why layers with trained batch norm are not recomputed, in words.

    Args:
        recomputed: A mode of `gradient_checkpointing`.
        batch_norm: A mode of `batch_norm`.
    """
    return (
        f"model.gradient_checkpointing: {recomputed} computes layers twice, and model.batch_norm: {batch_norm} would "
        "update their statistics twice"
    )


def _may_build_its_model(task: str) -> bool:
    """Return whether a task may need no `model.name`: a custom task, or a shipped one that builds its own module."""
    from ftcli.config.task_registry import is_custom_task, task_class

    return is_custom_task(task) or getattr(task_class(task), "auto_class", "") is None
