"""The recipe: everything that may move the loss curve, and a few machine hints that must not.

Every key is declared here once, with its bounds, its unit and its meaning; the JSON schema, the reference in
recipes/README.md and all error messages are drawn from these declarations. This module never imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, JsonValue, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

PositiveInt = Annotated[int, Field(ge=1)]
MACHINE_HINT = "Machine hint: must not move the curve."


class Section(BaseModel):
    """A mapping of a recipe: unknown keys are errors, types are strict, values never change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)


class Quantization(Section):
    """A frozen base model in 4 bits (bitsandbytes, on GPUs), under an adapter: QLoRA."""

    load_in_4bit: Literal[True] = Field(description="true: linear layers but the head are held in 4 bits.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = Field("nf4", description="Which 16 values a weight may have.")
    bnb_4bit_use_double_quant: bool = Field(
        True, description="Quantise the scales of each 64 weights too: 0.4 bits less for each weight."
    )


class Model(Section):
    """Which weights are trained, and how they are built."""

    name: str = Field(
        min_length=1,
        description="Name on the hub, local folder, or asset:NAME (a model that `ftcli fetch` brings).",
    )
    revision: str | None = Field(None, description="Branch, tag or commit on the hub.")
    trust_remote_code: bool = Field(False, description="Allow Python code that comes with the model to run.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Dtype that frozen weights are held in; auto: bfloat16 under precision bf16, else "
        "float32. Trained weights are held in float32, or in bfloat16 under bf16_pure.",
    )
    dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Sets every dropout probability of the model's configuration; absent: the model's own. "
        "Above 0 a run is exact only on the same profile, world and micro size.",
    )
    batch_norm: Literal["frozen", "train"] = Field(
        "frozen",
        description="frozen: statistics of batch normalisation stay as loaded; train: they follow each "
        "process's own rows, and the curve then depends on the hardware.",
    )
    quantization: Quantization | None = Field(
        None,
        description="Hold the frozen weights in 4 bits. They are computed with in the recipe's precision, and stored "
        "as numbers of that dtype, so that they can be sharded.",
    )
    new_tokens: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="Tokens to add to the tokenizer. Their rows of the embeddings, and of an untied head, start as the "
        "mean of the model's own; with an adapter these rows are trained beside it.",
    )
    attn_implementation: str | None = Field(
        None, description=f"Attention kernel, as transformers names it. {MACHINE_HINT}"
    )
    gradient_checkpointing: bool = Field(
        False,
        description=f"Recompute activations in the backward pass: less memory, more time. {MACHINE_HINT}",
    )


class Adapter(Section):
    """Which few weights are trained instead of the whole model (peft)."""

    type: Literal["none", "lora"] = Field("none", description="none: the whole model is trained.")
    r: int = Field(8, ge=1, le=4096, description="Rank of the update matrices.")
    lora_alpha: float = Field(16, gt=0, description="The update is scaled by lora_alpha / r.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input, a probability.")
    target_modules: str | list[str] = Field(
        "all-linear",
        description="all-linear, a list of module-name endings, or one regular expression over full names.",
    )
    exclude_modules: list[str] = Field(
        default_factory=list, description="Module-name endings that get no adapter though target_modules names them."
    )
    modules_to_save: list[str] = Field(
        default_factory=list,
        description="Module-name endings that are trained in full, and saved beside the adapter. New heads always are.",
    )
    use_rslora: bool = Field(False, description="Scale the update by lora_alpha / sqrt(r): rank-stabilised LoRA.")
    use_dora: bool = Field(
        False, description="Also train the length of every output's weights, apart from their direction: DoRA."
    )
    loraplus_lr_ratio: float | None = Field(
        None,
        gt=0,
        description="LoRA+: B matrices learn at optimizer.learning_rate times this (often 16). Absent: like all.",
    )
    path: str | None = Field(
        None,
        min_length=1,
        description="Folder of an adapter to go on from (peft's, or final/ of a run); this section must agree with it.",
    )

    @model_validator(mode="after")
    def _has_a_type(self) -> Adapter:
        if self.type == "none" and self.path is not None:
            raise ValueError("path names an adapter, and type is none: set type to lora, or leave path out")
        return self


class Source(Section):
    """Where rows come from. A bare string in a recipe is read as its path."""

    path: str = Field(
        min_length=1,
        description="Local file (jsonl, json, csv, parquet, txt), image folder, asset:NAME/FILE, or name on the hub.",
    )
    name: str | None = Field(None, description="Configuration of a data set on the hub.")
    split: str = Field("train", min_length=1, description="Split of a data set on the hub.")
    label: str | None = Field(
        None, min_length=1, description="Its name in reports and metrics; absent: the file's name without its ending."
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="Column map of this source, instead of data.columns."
    )
    max_rows: PositiveInt | None = Field(
        None, description="At most so many of its rows are used, chosen by the seed; null: all."
    )
    weight: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="An epoch takes round(weight x rows) of its rows, those chosen by the seed: below 1 the same part "
        "in every epoch, above 1 rows occur several times. Training rows only.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        section = handler.resolve_ref_schema(handler(core_schema))
        return {"anyOf": [{"type": "string", "minLength": 1}, section]}


Sources = Annotated[list[Source], Field(min_length=1)]


class Data(Section):
    """Which rows are trained and evaluated."""

    train: Source | Sources = Field(description="Rows to train on: one source, or a list of them.")
    eval: Source | Sources | None = Field(
        None,
        description="Rows to evaluate on: one source, or a list of them, each then with a loss of its own "
        "(`eval/<label>/loss`).",
    )
    eval_rows: int = Field(
        0,
        ge=0,
        description="Rows held out of data.train for evaluation, chosen by the seed; only without data.eval.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Name the task expects -> name in the file, for instance {text: body, label: category}.",
    )
    drop_last: bool = Field(
        True,
        description="true: an epoch is cut to a multiple of batch.global_size; false: the rows left over make one "
        "smaller step, weighed exactly.",
    )
    max_length: int = Field(1024, ge=2, description="Longest row, in tokens. Text tasks only.")
    chat_template_kwargs: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Variables of the chat template, for instance {enable_thinking: false}, as apply_chat_template "
        "takes them; for rows, prompts and answers alike. A row's own column `chat_template_kwargs` goes before them.",
    )
    truncation: Literal["truncate", "drop", "split"] | None = Field(
        None,
        description="What becomes of a row longer than max_length. truncate: its end is cut off; drop: it is left out; "
        "split: it becomes several rows, and no trained token is lost. null: split for pretrain, truncate for the "
        "other text tasks. The log tells how many rows it was.",
    )
    max_bad_rows: int = Field(
        0,
        ge=0,
        description="So many rows that the task cannot use (another shape, no answer) may be left out, counted over "
        "all sources; the log tells their numbers. One more is an error.",
    )
    packing: bool = Field(
        False,
        description="true: whole documents share rows of max_length tokens, best-fit decreasing, and never see each "
        "other; batch.global_size then counts such rows. Language-model tasks only. Evaluation rows are not packed.",
    )
    padding_free: bool = Field(
        False,
        description="true: the rows of a micro-batch are laid end to end instead of padded, each confined to itself; "
        f"packing does so anyway. Language-model tasks only. {MACHINE_HINT}",
    )
    group_by_length: bool = Field(
        False,
        description="true: steps are made of rows of similar length, drawn from 50 steps' rows at a time, which saves "
        "padding; it changes the order of the rows. Not with packing.",
    )
    streaming: bool = Field(
        False,
        description="true: rows of data.train are read and tokenised as they come, for corpora that do not fit a disk. "
        "Its path may also be a pattern (data/*.jsonl), a folder of data files, or an address that fsspec knows "
        "(https://, s3://, hf://), files also compressed (.gz, .zst). Language-model tasks, one source, "
        "train.max_steps. The order of the rows depends on the files, the seed and batch.global_size, never on the "
        "processes; rows with nothing to train on are left out.",
    )
    shuffle_buffer: PositiveInt | None = Field(
        None,
        description="Rows of a stream that are shuffled (and packed) among themselves, over all of its files; null: "
        "10000. Only with streaming.",
    )
    workers: int = Field(
        0,
        ge=0,
        le=64,
        description=f"Loader processes per training process; 0 loads in the training process. {MACHINE_HINT}",
    )

    @property
    def train_sources(self) -> list[Source]:
        """Sources of the training rows, one or several."""
        return self.train if isinstance(self.train, list) else [self.train]

    @property
    def eval_sources(self) -> list[Source]:
        """Sources of the evaluation rows; none when there are none, or when they are held out of data.train."""
        return self.eval if isinstance(self.eval, list) else [] if self.eval is None else [self.eval]

    def columns_of(self, source: Source) -> dict[str, str]:
        """Return the column map of a source: its own, else that of all."""
        return source.columns or self.columns

    @model_validator(mode="after")
    def _one_evaluation_set(self) -> Data:
        if self.eval is not None and self.eval_rows:
            raise ValueError("eval and eval_rows exclude each other: keep one of the two")
        if any(source.weight != 1 for source in self.eval_sources):
            raise ValueError("eval: a weight is for training rows only; use max_rows to measure fewer")
        return self

    @model_validator(mode="after")
    def _a_stream_is_read_once(self) -> Data:
        if not self.streaming:
            if self.shuffle_buffer is not None:
                raise ValueError("shuffle_buffer is for streams: set streaming to true, or delete it")
            return self
        source = self.train_sources[0]
        refused = {
            "eval_rows, which are held out of all rows: name evaluation rows with data.eval": self.eval_rows > 0,
            "several sources: name one, which may be a pattern or a folder": len(self.train_sources) > 1,
            "a weight: all rows of its one source are read": source.weight != 1,
            "max_rows: train.max_steps bounds what is read": source.max_rows is not None,
            "group_by_length: it needs the lengths of all rows": self.group_by_length,
            "max_bad_rows above 0: each process would count its own": self.max_bad_rows > 0,
            "more than one of workers: a second would read the same rows": self.workers > 1,
        }
        if found := [told for told, is_so in refused.items() if is_so]:
            raise ValueError(f"streaming does not go with {'; nor with '.join(found)}")
        return self

    @model_validator(mode="after")
    def _bins_are_of_one_length(self) -> Data:
        if self.packing and self.group_by_length:
            raise ValueError("packing and group_by_length exclude each other: packed rows are all of max_length tokens")
        return self


class Batch(Section):
    """How many rows one optimizer step sees. Gradient accumulation is derived, never written."""

    global_size: PositiveInt = Field(description="Rows per optimizer step over all processes and micro-batches.")
    micro_size: PositiveInt = Field(
        8,
        description="Most rows that one forward pass of one process may hold; the plan takes the largest "
        f"divisor that fits. {MACHINE_HINT}",
    )


class Train(Section):
    """How long training lasts: exactly one of max_steps and epochs."""

    max_steps: PositiveInt | None = Field(None, description="Length of the run, in optimizer steps.")
    epochs: float | None = Field(
        None, gt=0, description="Length of the run, in passes over data.train; 0.5 is half a pass."
    )
    max_minutes: float | None = Field(
        None,
        gt=0,
        description="Longest time from the start of one launch, in minutes: the run then saves, ends with exit code "
        f"75, and --resume auto goes on. Each launch does one step at least. {MACHINE_HINT}",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Train:
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("exactly one of max_steps and epochs must be given")
        return self


class Optimizer(Section):
    """How weights follow gradients."""

    name: Literal["adamw"] = Field("adamw", description="AdamW, fused where the device has it.")
    learning_rate: float = Field(gt=0, le=10, description="Peak learning rate.")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Decoupled decay, per unit of learning rate; not applied to biases and norms.",
    )
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=[0.9, 0.999], min_length=2, max_length=2, description="Decay rates of the two moments."
    )
    eps: float = Field(1e-8, gt=0, description="Added to the denominator.")
    max_grad_norm: float | None = Field(
        1.0,
        gt=0,
        description="Gradients are scaled down to this global 2-norm; null: never clipped.",
    )


class Schedule(Section):
    """Learning rate as a function of the optimizer step."""

    name: Literal["constant", "linear", "cosine"] = Field(
        "linear", description="Shape after warm-up; linear and cosine fall to min_ratio at the last step."
    )
    warmup_steps: float = Field(
        0, ge=0, description="Steps of linear warm-up: 1 or more: steps; below 1: a fraction of the run."
    )
    min_ratio: float = Field(0.0, ge=0, le=1, description="Final learning rate as a fraction of the peak.")


class Message(Section):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"] = Field(description="Whose turn it is.")
    content: str = Field(description="What is said, as text.")


class Generate(Section):
    """Prompts that the model answers at each evaluation, into samples.jsonl: exactly one of prompts and file."""

    prompts: list[Annotated[str, Field(min_length=1)] | Annotated[list[Message], Field(min_length=1)]] = Field(
        default_factory=list,
        description="What is asked: each a text (one user's turn where there is a chat template), or a list of "
        "messages with role and content.",
    )
    file: str | None = Field(
        None,
        description="A .txt file with one prompt a line, or a .jsonl file with messages or prompt in each row; the "
        "assistant's last turn, or the completion, is shown beside the answer.",
    )
    max_new_tokens: int = Field(64, ge=1, description="Longest answer, in tokens.")
    temperature: float = Field(0.0, ge=0, le=100, description="0: the likeliest token each time; above: drawn.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Draw from the likeliest tokens that together have this probability."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Generate:
        if bool(self.prompts) == (self.file is not None):
            raise ValueError("exactly one of prompts and file must be given")
        return self


class Evaluate(Section):
    """When evaluation rows are measured and prompts answered. The last step always is, when there are any."""

    every_steps: PositiveInt | None = Field(
        None, description="Evaluate each time so many optimizer steps are done; null: only after the last."
    )
    at_start: bool = Field(False, description="Evaluate once before the first step too.")
    generate: Generate | None = Field(
        None, description="Prompts to answer at each evaluation, also without evaluation rows; null: none."
    )


ANSWER_METRICS = ("answer_tokens", "answers_ended")  # of evaluate.generate, which need no rows


class Best(Section):
    """Which evaluation decides what the best checkpoint is."""

    metric: str = Field(min_length=1, description="Name of a metric, as `eval/<name>` in metrics.jsonl.")
    direction: Literal["min", "max"] = Field(description="min: the smallest value is the best; max: the largest.")


class Checkpoint(Section):
    """When all that resuming needs is saved. The last step always is, and so is the step a run is stopped at."""

    every_steps: PositiveInt | None = Field(
        None, description="Save each time so many optimizer steps are done; null: only after the last."
    )
    keep: PositiveInt | None = Field(
        2,
        description="How many checkpoints stay, the newest ones; null: all. With two a damaged one costs a few "
        "steps only. An old one is removed when the new one is complete.",
    )
    background: bool = Field(
        True,
        description="Train on while a checkpoint is written: a step then waits only for a copy to host memory, where "
        "each process needs room for all it saves (12 bytes for every float32 weight that is trained, divided by the "
        "number of processes). false, or too little memory: wait for the disk, with one file of 256 MiB in memory "
        f"at a time. {MACHINE_HINT}",
    )
    keep_best: Best | None = Field(
        None,
        description="Let the checkpoint with the best evaluation stay too; evaluate at the steps that are saved.",
    )


class Faults(Section):
    """What happens to a step whose loss or gradient is not finite (an overflow under fp16 is none: see precision)."""

    non_finite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="stop: the run ends with exit code 1 and names step, ranks and rows. skip: the step's update is "
        "left out; the host then waits for the device at every step. rollback: the run goes back to its newest "
        "checkpoint, and never again sees the rows of that step.",
    )
    max_in_a_row: PositiveInt = Field(3, description="The run ends when more steps than this follow each other so.")
    max_in_all: PositiveInt = Field(10, description="The run ends when more steps than this were so, over all resumes.")


class Log(Section):
    """What is written down while training."""

    every_steps: PositiveInt = Field(1, description="Write a row of metrics.jsonl every so many steps.")
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(
        default_factory=list, description="Further places that metrics are sent to, through Accelerate."
    )


class Recipe(Section):
    """One training experiment, whole. What is trained; the profile says where."""

    task: str = Field(
        min_length=1,
        description="sft, pretrain, text_classification, image_classification, ./my_task.py, or package.module.",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seeds weights, data order and dropout.")
    precision: Literal["fp32", "bf16", "fp16", "bf16_pure"] = Field(
        "fp32",
        description="Dtype of the forward and backward pass; weights, optimizer and gradient sums stay float32, but "
        "bf16_pure holds them in bfloat16 too (a quarter of the memory, and small updates are lost). fp16 scales the "
        "loss and skips steps whose gradient overflows.",
    )
    output: str | None = Field(None, description="Run folder; absent: runs/<file name of the recipe>.")
    model: Model = Field(description="Which weights are trained, and how they are built.")
    adapter: Adapter = Field(default_factory=Adapter, description="Train a small adapter instead of the whole model.")
    data: Data = Field(description="Which rows are trained and evaluated.")
    task_options: dict[str, Any] = Field(
        default_factory=dict, description="Keys that the task itself declares (`ftcli show tasks`)."
    )
    batch: Batch = Field(description="Rows per optimizer step.")
    train: Train = Field(description="How long training lasts.")
    optimizer: Optimizer = Field(description="How weights follow gradients.")
    schedule: Schedule = Field(default_factory=Schedule, description="Learning rate as a function of the step.")
    evaluate: Evaluate = Field(default_factory=Evaluate, description="When the evaluation rows are measured.")
    checkpoint: Checkpoint = Field(
        default_factory=Checkpoint, description="When all that resuming needs is saved, and how much of it stays."
    )
    faults: Faults = Field(
        default_factory=Faults, description="What happens to a step whose loss or gradient is not finite."
    )
    log: Log = Field(default_factory=Log, description="What is written down while training.")

    @model_validator(mode="after")
    def _best_is_measured(self) -> Recipe:
        best = self.checkpoint.keep_best
        if best is None or self.data.eval is not None or self.data.eval_rows:
            return self
        if self.evaluate.generate is None or best.metric not in ANSWER_METRICS:
            raise ValueError("checkpoint.keep_best needs evaluation rows: set data.eval or data.eval_rows")
        return self

    @model_validator(mode="after")
    def _faults_can_be_undone(self) -> Recipe:
        policy = self.faults.non_finite
        if policy == "skip" and self.model.batch_norm == "train":
            raise ValueError("faults.non_finite: skip cannot undo what a step did to batch_norm: train; use rollback")
        if policy == "rollback" and self.checkpoint.every_steps is None:
            raise ValueError("faults.non_finite: rollback needs checkpoints to go back to: set checkpoint.every_steps")
        return self

    @model_validator(mode="after")
    def _a_stream_has_no_end(self) -> Recipe:
        if self.data.streaming and self.train.max_steps is None:
            raise ValueError("data.streaming needs train.max_steps: how many rows an epoch has is not known")
        if self.data.streaming and self.faults.non_finite == "rollback":
            raise ValueError("faults.non_finite: rollback does not go with data.streaming: use stop or skip")
        return self

    @model_validator(mode="after")
    def _quantised_weights_are_frozen(self) -> Recipe:
        if self.model.quantization is not None and self.adapter.type == "none":
            raise ValueError(
                "model.quantization holds weights in 4 bits, which cannot be trained: set adapter.type: lora"
            )
        return self

    @model_validator(mode="after")
    def _no_padding_in_statistics(self) -> Recipe:
        if self.model.batch_norm == "train" and not self.data.drop_last:
            raise ValueError("data.drop_last: false pads the last step, and batch_norm: train would count the padding")
        return self
