"""The architecture table: properties of transformers' models that ftcli relies on, one row per `model_type`.

Models without a row train too: with padding, without compiled layers, and with the logits of their own forward. Tests
compare each entry with the model in transformers. The module never imports torch or transformers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple


class LearnedPositions(NamedTuple):
    """Where a configuration has the number of learned positions. Rotary and relative positions have no limit.

    Attributes:
        key: Key of the configuration.
        begins_behind_padding: Whether the first position is the one after the padding token's id.
    """

    key: str
    begins_behind_padding: bool = False


class LigerNorm(NamedTuple):
    """Arguments of Liger's RMSNorm kernel.

    Attributes:
        casting_mode: The order of rounding and scaling.
        offset: Number added to the norm's weights.
    """

    casting_mode: str
    offset: float


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        packed_attention: The features of attention besides causality and positions. Packed documents have the same
            logits as separate rows. None refuses packing.
        has_attention_sinks: Whether attention has sinks, which no kernel for packed documents supports.
        compiles_layers: Whether layers are compiled by default. False for models with experts: the rows of an expert
            are known on the device only, so graphs would break in every layer.
        cast_norms: Names of norms whose output is used by several linear layers and by nothing else. Norms before
            experts are left out, because the router uses unrounded values.
        liger_norm: Arguments of Liger's norm kernel; None does not use Liger's kernels.
        head: "linear" if logits are the output of a linear head. Otherwise the setting with which the model changes
            the logits. None uses the model's own forward.
        has_experts: Whether the feed-forward consists of experts.
        learned_positions: Where the configuration has the number of positions; None if they are not learned.
        lacks_gate: Whether the feed-forward is not gated, so that it has two matrix products instead of three.
        norms_queries: Whether queries and keys pass norms.
        norms_outputs: Whether the outputs of attention and of the feed-forward pass norms.
        ties_head: Whether the head is the table of embeddings, if the configuration leaves it open.
        reads_last_position: Whether a classifier reads the last position of a row even where it is padding.
    """

    packed_attention: str | None = None
    has_attention_sinks: bool = False
    compiles_layers: bool = False
    cast_norms: tuple[str, ...] = ()
    liger_norm: LigerNorm | None = None
    head: str | None = None
    has_experts: bool = False
    learned_positions: LearnedPositions | None = None
    lacks_gate: bool = False
    norms_queries: bool = False
    norms_outputs: bool = False
    ties_head: bool = False
    reads_last_position: bool = False

    @property
    def tiles_mlp(self) -> bool:
        """Whether the feed-forward is an MLP with a gate whose input, the output of a norm, nothing else reads."""
        return len(self.cast_norms) == 2 and not self.lacks_gate and not self.has_experts


LINEAR = "linear"
SOFTCAP, DIVISOR, FACTOR = "final_logit_softcapping", "logits_scaling", "logit_scale"  # settings of a head
BEFORE_ATTENTION = ("input_layernorm",)
BEFORE_BOTH = ("input_layernorm", "post_attention_layernorm")
BEFORE_BOTH_OF_FOUR = ("input_layernorm", "pre_feedforward_layernorm")
LLAMA_NORM, GEMMA_NORM = LigerNorm("llama", 0.0), LigerNorm("gemma", 1.0)

ARCHITECTURES = {
    "llama": Architecture(
        "grouped heads", compiles_layers=True, cast_norms=BEFORE_BOTH, liger_norm=LLAMA_NORM, head=LINEAR
    ),
    "mistral": Architecture(
        "sliding window", compiles_layers=True, cast_norms=BEFORE_BOTH, liger_norm=LLAMA_NORM, head=LINEAR
    ),
    "mixtral": Architecture("sliding window", cast_norms=BEFORE_ATTENTION, head=LINEAR, has_experts=True),
    "qwen2": Architecture(
        "windows in some layers", compiles_layers=True, cast_norms=BEFORE_BOTH, liger_norm=LLAMA_NORM, head=LINEAR
    ),
    "qwen2_moe": Architecture("grouped heads", cast_norms=BEFORE_ATTENTION, head=LINEAR, has_experts=True),
    "qwen3": Architecture(
        "normed queries and keys, windows in some layers",
        compiles_layers=True,
        cast_norms=BEFORE_BOTH,
        liger_norm=LLAMA_NORM,
        head=LINEAR,
        norms_queries=True,
    ),
    "qwen3_moe": Architecture(
        "normed queries and keys", cast_norms=BEFORE_ATTENTION, head=LINEAR, has_experts=True, norms_queries=True
    ),
    "gemma": Architecture(
        "wide heads", compiles_layers=True, cast_norms=BEFORE_BOTH, liger_norm=GEMMA_NORM, head=LINEAR, ties_head=True
    ),
    "gemma2": Architecture(
        "soft-capping, windows in every second layer",
        compiles_layers=True,
        cast_norms=BEFORE_BOTH_OF_FOUR,
        norms_outputs=True,
        liger_norm=GEMMA_NORM,
        head=SOFTCAP,
        ties_head=True,
    ),
    "gemma3_text": Architecture(
        "windows, two rotary bases",
        compiles_layers=True,
        cast_norms=BEFORE_BOTH_OF_FOUR,
        norms_outputs=True,
        liger_norm=GEMMA_NORM,
        head=SOFTCAP,
        norms_queries=True,
        ties_head=True,
    ),
    "phi": Architecture(
        "partial rotary", compiles_layers=True, cast_norms=BEFORE_ATTENTION, head=LINEAR, lacks_gate=True
    ),
    "phi3": Architecture("fused projections, sliding window", compiles_layers=True, liger_norm=LLAMA_NORM, head=LINEAR),
    "gpt2": Architecture(
        "learned positions",
        compiles_layers=True,
        head=LINEAR,
        learned_positions=LearnedPositions("n_positions"),
        lacks_gate=True,
        ties_head=True,
    ),
    "gpt_neox": Architecture("partial rotary", compiles_layers=True, head=LINEAR, lacks_gate=True),
    "smollm3": Architecture(
        "layers without positions",
        compiles_layers=True,
        cast_norms=BEFORE_BOTH,
        liger_norm=LLAMA_NORM,
        head=LINEAR,
        ties_head=True,
    ),
    "olmo": Architecture("plain", compiles_layers=True, head=LINEAR),
    "olmo2": Architecture("normed queries and keys", compiles_layers=True, head=LINEAR, norms_queries=True),
    "olmo3": Architecture("windows in some layers", compiles_layers=True, head=LINEAR, norms_queries=True),
    "granite": Architecture(
        "scaled scores", compiles_layers=True, cast_norms=BEFORE_BOTH, liger_norm=LLAMA_NORM, head=DIVISOR
    ),
    "gpt_oss": Architecture(
        "sinks, windows in every second layer",
        has_attention_sinks=True,
        cast_norms=BEFORE_ATTENTION,
        head=LINEAR,
        has_experts=True,
    ),
    "starcoder2": Architecture(
        "sliding window",
        compiles_layers=True,
        cast_norms=BEFORE_ATTENTION,
        head=LINEAR,
        lacks_gate=True,
        ties_head=True,
    ),
    "cohere": Architecture(head=FACTOR, ties_head=True),
    "cohere2": Architecture(
        "windows, layers without positions",
        compiles_layers=True,
        cast_norms=BEFORE_ATTENTION,
        head=FACTOR,
        ties_head=True,
    ),
    "glm4": Architecture("partial rotary", compiles_layers=True, cast_norms=BEFORE_ATTENTION, head=LINEAR),
    "deepseek_v3": Architecture("latent heads", cast_norms=BEFORE_ATTENTION, head=LINEAR, has_experts=True),
    "opt": Architecture(
        "learned positions",
        compiles_layers=True,
        cast_norms=("self_attn_layer_norm",),
        head=LINEAR,
        learned_positions=LearnedPositions("max_position_embeddings"),
        lacks_gate=True,
        ties_head=True,
    ),
    "vit": Architecture(cast_norms=("layernorm_before",), lacks_gate=True),
    **dict.fromkeys(
        ("bert", "distilbert", "electra", "albert"),
        Architecture(learned_positions=LearnedPositions("max_position_embeddings"), lacks_gate=True, ties_head=True),
    ),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "mpnet"),
        Architecture(
            learned_positions=LearnedPositions("max_position_embeddings", begins_behind_padding=True),
            lacks_gate=True,
            ties_head=True,
        ),
    ),
    "xlnet": Architecture(reads_last_position=True),
}

# Settings that change logits after the head, in any configuration.
HEAD_SETTINGS = (SOFTCAP, DIVISOR, FACTOR)
# Names that transformers gives to modules and classes, whatever the model's type.
POSITION_MODULES = re.compile(r"(^|\.)(wpe|position_embeddings|embed_positions|positions_embed)$")
POSITION_TABLES = re.compile(r"(^|\.)(embed_positions|pos_encoding)$")  # buffers of a fixed length (CodeGen, CTRL)
EXPERT_MODULES = ("experts",)  # may have no gradient for many steps, because a router selects experts for each token
LINEAR_CLASSES = ("Linear", "Conv1D", "Float8Linear")  # modules that only multiply; subclasses may do more


def architecture_of(model_type: object) -> Architecture:
    """Return the row of a `model_type`; a row with the defaults for None or a type without a row."""
    return ARCHITECTURES.get(model_type, Architecture()) if isinstance(model_type, str) else Architecture()


def model_types_with(column: str) -> list[str]:
    """Return the model types with an entry in a column of the table, in the table's order."""
    return [model_type for model_type, row in ARCHITECTURES.items() if getattr(row, column)]
