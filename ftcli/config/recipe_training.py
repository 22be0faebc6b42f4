"""Declare the recipe sections for the training itself: batch, length, optimizer, evaluation, checkpoints, log, hub.

recipe_model.py and recipe_data.py declare the sections for model and data. Light: never imports torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ftcli.config.section import (
    MACHINE_HINT,
    Countable,
    CountFloat,
    CountInt,
    PathText,
    PositiveInt,
    RepositoryName,
    Section,
)


class Batch(Section):
    """Rows per optimizer step. Gradient accumulation is derived and cannot be set."""

    global_size: PositiveInt = Field(description="Rows per optimizer step over all processes and micro-batches.")
    micro_size: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="Maximum number of rows in one forward pass of one process. The plan uses the largest divisor of "
        "the rows per process that is not above it. auto: as many rows as fit by their real tokens, and the rows of a "
        "step are shared out over the processes by tokens. Rows without tokens, and streams: the most rows that fit, "
        "found on the GPUs with the longest rows at the start of the run and stored in its folder; 8 without a GPU. "
        f"{MACHINE_HINT} Except under precision fp16: the rows of a pass decide which gradients overflow, and so which "
        "steps are skipped. With model.batch_norm train or sync a number is needed: the rows of a pass decide its "
        "statistics.",
    )


class Train(Section):
    """How long training lasts: exactly one of max_steps and epochs."""

    max_steps: PositiveInt | None = Field(None, description="Length of the run, in optimizer steps.")
    epochs: Annotated[float, Field(gt=0), Countable] | None = Field(
        None, description="Length of the run, in passes over data.train; 0.5 is half a pass."
    )
    max_minutes: float | None = Field(
        None,
        gt=0,
        description="Time limit of one launch, in minutes. The run then saves a checkpoint and ends with exit code 75; "
        f"--resume auto resumes it. Each launch trains at least one step. {MACHINE_HINT}",
    )

    @model_validator(mode="after")
    def _check_exactly_one(self) -> Train:
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("exactly one of max_steps and epochs must be given")
        return self


class Optimizer(Section):
    """The optimizer and gradient clipping."""

    name: Literal["adamw", "adamw_8bit", "sgd"] = Field(
        "adamw",
        description="adamw: AdamW, fused if the device supports it. adamw_8bit: AdamW with moments in 8 bits "
        "(bitsandbytes, on GPUs, under profiles that update parameters or their shards on the GPU), 6 bytes less per "
        "float32 weight; the loss differs slightly. sgd: torch's SGD, with momentum.",
    )
    learning_rate: float = Field(gt=0, le=10, description="Peak learning rate.")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Decay of weights, not of biases and norms. AdamW: decoupled, per unit of learning rate. sgd: "
        "weight_decay times the weight is added to the gradient after clipping, as in torch.",
    )
    momentum: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="sgd only: factor of the sum of past gradients; 0: none, which saves 4 bytes per weight.",
    )
    nesterov: bool = Field(False, description="sgd only: Nesterov's momentum.")
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=[0.9, 0.999],
        min_length=2,
        max_length=2,
        description="AdamW only: decay rates of the two moments. Keep the first at 0.99 or below with precision "
        "bf16_pure: its moment is bfloat16 there, which rounds a slower decay away.",
    )
    eps: float = Field(1e-8, gt=0, description="AdamW only: added to the denominator.")
    max_grad_norm: float | None = Field(
        1.0,
        gt=0,
        description="Gradients are clipped to this global 2-norm; null: no clipping.",
    )

    @model_validator(mode="after")
    def _check_nesterov(self) -> Optimizer:
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs momentum: set momentum above 0, or delete nesterov")
        return self


class Schedule(Section):
    """Learning rate as a function of the optimizer step."""

    name: Literal["constant", "linear", "cosine"] = Field(
        "linear",
        description="Shape after warm-up; linear and cosine reach min_ratio one step after the last.",
    )
    warmup_steps: CountFloat = Field(
        0, ge=0, description="Steps of linear warm-up: 1 or more: steps; below 1: a fraction of the run."
    )
    min_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Final value of linear and cosine, as a fraction of the peak; the last step is just above it.",
    )


class Message(Section):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"] = Field(description="Role of the message.")
    content: str = Field(description="Text of the message.")


class Generate(Section):
    """Prompts that the model answers at each evaluation, into samples.jsonl: exactly one of prompts and file."""

    prompts: list[Annotated[str, Field(min_length=1)] | Annotated[list[Message], Field(min_length=1)]] = Field(
        default_factory=list,
        description="Each prompt is a text (one user message if there is a chat template), or a list of messages with "
        "role and content.",
    )
    file: PathText | None = Field(
        None,
        description="A .txt file with one prompt per line, or a .jsonl file with messages or prompt in each row; the "
        "assistant's last message, or the completion, is shown beside the answer.",
    )
    max_new_tokens: CountInt = Field(64, ge=1, description="Longest answer, in tokens.")
    temperature: float = Field(0.0, ge=0, le=100, description="0: the most likely token. Above 0: sampled.")
    top_p: float = Field(1.0, gt=0, le=1, description="Sample from the most likely tokens with this total probability.")

    @model_validator(mode="after")
    def _check_exactly_one(self) -> Generate:
        if bool(self.prompts) == (self.file is not None):
            raise ValueError("exactly one of prompts and file must be given")
        return self


class Evaluate(Section):
    """When the model is evaluated and answers prompts. An evaluation after the last step always takes place."""

    every_steps: PositiveInt | None = Field(
        None, description="Number of optimizer steps between evaluations; null: only after the last step."
    )
    at_start: bool = Field(False, description="Evaluate once before the first step too.")
    generate: Generate | None = Field(
        None, description="Prompts to answer at each evaluation, even without evaluation rows; null: none."
    )


ANSWER_METRICS = ("answer_tokens", "answers_ended")  # of evaluate.generate, which need no rows


class Best(Section):
    """The metric that selects the best checkpoint."""

    metric: str = Field(min_length=1, description="Name of a metric, as `eval/<name>` in metrics.jsonl.")
    direction: Literal["min", "max"] = Field(description="min: the smallest value is the best; max: the largest.")


class Checkpoint(Section):
    """When checkpoints are saved. The last step is always saved, and so is the step at which a run is stopped."""

    every_steps: PositiveInt | None = Field(
        None, description="Number of optimizer steps between checkpoints; null: only after the last step."
    )
    keep: PositiveInt | None = Field(
        2,
        description="Number of newest checkpoints to keep; null: all. With two, a damaged checkpoint costs only a few "
        "steps. An old checkpoint is deleted when the new one is complete.",
    )
    background: bool = Field(
        True,
        description="Continue training while a checkpoint is written. A step then waits only for a copy to host "
        "memory. Each process needs host memory for its part of the checkpoint (12 bytes per trained float32 weight, "
        "divided by the number of processes). If the run is killed, an incomplete newest checkpoint is lost. false, "
        "or too little memory: training waits for the disk, with one file of 256 MiB in memory at a time. "
        f"{MACHINE_HINT}",
    )
    keep_best: Best | None = Field(
        None,
        description="Also keep the checkpoint with the best evaluation; evaluate at the steps that are saved.",
    )


class Faults(Section):
    """What happens after a step with a non-finite loss or gradient, and to tensors that have no gradient.

    An overflow under fp16 is not a fault: see precision.
    """

    non_finite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="stop: the run ends with exit code 1 and names step, ranks and rows. skip: the step's update is "
        "left out; the host then waits for the device at every step. rollback: the run returns to its newest "
        "checkpoint and excludes the rows of that step from then on.",
    )
    max_in_a_row: PositiveInt = Field(3, description="Maximum number of consecutive non-finite steps.")
    max_in_all: PositiveInt = Field(10, description="Maximum number of non-finite steps of a run, over all resumes.")
    missing_gradient: Literal["stop", "warn"] = Field(
        "stop",
        description="What happens when a trained tensor has no gradient in the first 20 steps of a launch. stop: the "
        "run ends with exit code 1 and names the tensors. warn: the log names them once.",
    )


class Log(Section):
    """Where and how often metrics are written."""

    every_steps: PositiveInt = Field(1, description="Number of optimizer steps between rows of metrics.jsonl.")
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(
        default_factory=list, description="Trackers that also receive the metrics, through Accelerate."
    )
    report: bool = Field(
        False, description="`ftcli train` writes report.html into the run folder at its end, also of a failed run."
    )


class Hub(Section):
    """Upload of the trained weights to a repository of models, by `ftcli export --push` in a process of its own."""

    push: RepositoryName | None = Field(
        None,
        description="Repository that receives the weights: `owner/name`, or `name` for the owner of the token; null: "
        "nothing is uploaded. The token is read from HF_TOKEN or from `hf auth login`, never from the recipe.",
    )
    push_at: Literal["end", "checkpoint"] = Field(
        "end",
        description="end: upload the final weights once, after the run is done. checkpoint: also upload the newest "
        "checkpoint whenever one is complete and no upload is in progress.",
    )
    private: bool = Field(False, description="Create a private repository; refuse a public one that exists.")
