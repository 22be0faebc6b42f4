"""Declare the recipe sections of the model and its adapter.

recipe_data.py and recipe_training.py declare the other sections. Light: never imports torch.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ftcli.config.section import MACHINE_HINT, PathText, Section


def _checkpointing_mode(value: Any) -> Any:
    """Convert true and false, as transformers and earlier recipes write them, to a mode of `gradient_checkpointing`."""
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


class Quantization(Section):
    """A frozen base model in 4 bits (bitsandbytes, on GPUs), under an adapter: QLoRA."""

    load_in_4bit: Literal[True] = Field(description="true: all linear layers except the head are stored in 4 bits.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = Field("nf4", description="The 16 values that a weight may have.")
    bnb_4bit_use_double_quant: bool = Field(
        True, description="Quantise the scales too, of which each 64 weights have one: 0.4 bits less per weight."
    )


NO_MODEL = "none"  # model.name of a recipe whose custom task builds the model
DROPOUT = "Above 0 a run is reproducible only on the same profile, number of processes and micro size."


class Model(Section):
    """The model, and how it is loaded and run."""

    name: PathText = Field(
        min_length=1,
        description="Name on the hub, local folder, or asset:NAME (a model that `ftcli fetch` downloads). Not needed "
        "by a task that builds its own model.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit on the hub.")
    trust_remote_code: bool = Field(
        False,
        description="Allow Python code that comes with the model to run. It is not stored with a run: "
        "later commands on the run need --trust-remote-code.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Dtype of frozen weights; auto: bfloat16 under precision bf16, else float32. Trained weights are "
        "float32, or bfloat16 under bf16_pure.",
    )
    dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description=f"Sets every dropout probability of the model's configuration; absent: the model's own. {DROPOUT}",
    )
    batch_norm: Literal["frozen", "train", "sync"] = Field(
        "frozen",
        description="Statistics of batch normalisation. frozen: as loaded. train: those of the rows of one forward "
        "pass of a process; the curve then depends on batch.micro_size. sync: those of one forward pass of all "
        "processes; without accumulation the curve is then the same on any number of processes. Running statistics "
        "of train and sync are updated, evaluated and exported.",
    )
    quantization: Quantization | None = Field(
        None,
        description="Store the frozen weights in 4 bits. The computation uses the recipe's precision. The bits are "
        "stored in tensors of that dtype, so that they can be sharded.",
    )
    new_tokens: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="Tokens to add to the tokenizer. Their embeddings, and their rows of an untied head, start as the "
        "mean of the existing ones. With an adapter these rows are trained too.",
    )
    attn_implementation: str | None = Field(
        None,
        description="Attention kernel, by its name in transformers; null: the best installed one. Packed and "
        "padding-free rows need sdpa (PyTorch's kernels) or flash_attention_2, _3 or _4. "
        f"{MACHINE_HINT}",
    )
    use_liger_kernel: bool | None = Field(
        None,
        description="Use Liger's kernels for norms, gated MLPs and rotary positions, on GPUs; null: if the package is "
        f"installed and the architecture is supported. {MACHINE_HINT}",
    )
    torch_compile: bool | None = Field(
        None,
        description="Compile each layer (torch.compile): faster steps, after 10 to 30 s of compilation at the "
        "start. Evaluation is not compiled. null: on GPUs in half precision, if the architecture is supported and the "
        f"run is long enough to gain time; the log states the choice. {MACHINE_HINT}",
    )
    cuda_graphs: bool | None = Field(
        None,
        description="Replay the passes of an image classifier or a text encoder as CUDA graphs, which spares the "
        "host the launch of each kernel. For the profiles single and ddp, without adapter and torch_compile. "
        "null: on GPUs for tasks and model types on which this was compared, if memory allows it. "
        f"{MACHINE_HINT}",
    )
    gradient_checkpointing: Annotated[
        Literal["auto", "none", "selective", "full", "tiled"], BeforeValidator(_checkpointing_mode)
    ] = Field(
        "auto",
        description="Activations that the backward pass recomputes instead of storing them: less memory, more time. "
        "none: nothing. selective: all except matrix products and attention. full: each layer, from its input. tiled: "
        "the same, with MLPs in tiles of tokens. auto: the first of these that fits the device by an estimate; the log "
        f"and `ftcli check` state the choice and the reason. true and false mean full and none. {MACHINE_HINT}",
    )
    activation_offloading: Literal["auto"] | bool = Field(
        "auto",
        description="Store activations in pinned host memory until the backward pass. With gradient_checkpointing full "
        "or tiled (the results of auto with true here) only the inputs of layers are stored. auto: with full or tiled, "
        f"if the inputs do not fit the device and fit the host. {MACHINE_HINT}",
    )
    embeddings_on_host: Literal["auto"] | bool = Field(
        "auto",
        description="Keep frozen input embeddings under an adapter in host memory, and copy the rows of each "
        "micro-batch to the GPU: about 1 GB less for an 8B model. For models whose head has a table of its own, with "
        f"the profiles single and ddp. auto: if more would be recomputed otherwise. {MACHINE_HINT}",
    )
    shard_frozen: Literal["auto"] | bool = Field(
        "auto",
        description="Shard frozen weights under an adapter (FSDP, ZeRO-3). false: keep them whole on each GPU and "
        "train the adapter as under ddp. auto: false if they fit; the log and `ftcli check` state the choice. "
        f"{MACHINE_HINT}",
    )

    @model_validator(mode="after")
    def _check_compile(self) -> Model:
        if self.torch_compile and self.gradient_checkpointing == "selective":
            raise ValueError(
                "gradient_checkpointing selective cannot be combined with torch_compile, whose kernels hide the "
                "activations to store: set it to none or full, or delete it"
            )
        return self


class Adapter(Section):
    """The small adapter that is trained instead of the whole model (peft)."""

    type: Literal["none", "lora"] = Field("none", description="none: the whole model is trained.")
    r: int = Field(8, ge=1, le=4096, description="Rank of the update matrices.")
    lora_alpha: float = Field(16, gt=0, description="The update is scaled by lora_alpha / r.")
    lora_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=f"Dropout on the adapter's input, a probability. {DROPOUT}",
    )
    target_modules: str | list[str] = Field(
        "all-linear",
        description="all-linear, a list of module-name endings, or one regular expression over full names. An ending "
        "that matches no module may be that of a parameter, such as experts.down_proj. Every ending has to match.",
    )
    exclude_modules: list[str] = Field(
        default_factory=list, description="Module-name endings without an adapter, although target_modules names them."
    )
    modules_to_save: list[str] = Field(
        default_factory=list,
        description="Module-name endings that are trained in full and saved with the adapter. New heads always are.",
    )
    use_rslora: bool = Field(False, description="Scale the update by lora_alpha / sqrt(r): rank-stabilised LoRA.")
    use_dora: bool = Field(
        False, description="Train the magnitude of each output's weights separately from their direction: DoRA."
    )
    loraplus_lr_ratio: float | None = Field(
        None,
        gt=0,
        description="LoRA+: learning rate of B matrices, as multiple of optimizer.learning_rate (often 16). Absent: 1.",
    )
    path: PathText | None = Field(
        None,
        min_length=1,
        description="Folder of an adapter to start from (a peft folder, or final/ of a run). It must have the settings "
        "of this section.",
    )

    @model_validator(mode="after")
    def _check_type(self) -> Adapter:
        if self.model_fields_set and "type" not in self.model_fields_set:
            raise ValueError("type is missing, and without it the whole model is trained: write type: lora")
        if self.type == "none" and self.path is not None:
            raise ValueError("path names an adapter, and type is none: set type to lora, or delete path")
        if self.type != "none" and not self.target_modules:
            raise ValueError("target_modules is empty: name modules, or write all-linear")
        if self.type != "none" and isinstance(self.target_modules, str):
            try:
                re.compile(self.target_modules)
            except re.error as error:
                raise ValueError(f"target_modules is not a regular expression: {error}") from None
        return self
