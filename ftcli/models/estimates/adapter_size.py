"""Count the trained weights of a LoRA adapter from the shapes in the headers of weight files.

Modules are matched by their names, as `models/adapters.py` matches those of the model. Light: never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ftcli.config.task_registry import is_custom_task, task_class
from ftcli.models.adapter_targets import ALL_LINEAR, is_named
from ftcli.models.module_names import ends_with, is_in, is_saved
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.models.estimates.shape import Shape

OUTSIDE_LAYERS = ("embed", "wte", "wpe", "lm_head")  # parts of the names of matrices without an adapter
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "shared")  # endings of the names of embeddings
HEADS = ("lm_head", "embed_out", "output")  # those of heads, which are not stored if they are tied
# The first parts of a module's name may differ between the files and the model, and between versions of transformers.
PREFIXES = ("", "model.", "transformer.")
STORED_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "transformer.", "model.")
OTHER_TOWERS = ("vision_tower", "vision_model", "visual", "audio_tower", "multi_modal_projector")
TRANSPOSED = ("c_attn", "c_proj", "c_fc")  # GPT-2 stores [inputs, outputs]


def is_inside(name: str, size: Sequence[int]) -> bool:
    """Return whether a weight is a matrix of the layers: neither embeddings nor a head.

    Args:
        name: Name of the weight.
        size: Its shape.
    """
    return len(size) == 2 and not any(word in name for word in OUTSIDE_LAYERS)


def count_adapter(recipe: Recipe, shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the number of trained weights of a recipe with an adapter.

    Matrices of experts that are stored as one tensor of three dimensions are left out. If no name matches, every matrix
    of the layers counts: names in a configuration alone are those of Llama.

    Args:
        recipe: The recipe.
        shapes: The shape of each weight of the model by name.
    """
    section, count, tables, adapts_head = recipe.adapter, 0, 0, False
    texts = {name: size for name, size in shapes.items() if not _is_tower(name)}
    towers, reads_text = len(texts) < len(shapes), any(_is_one(name.rpartition(".")[0], EMBEDDINGS) for name in texts)
    if reads_text and not is_custom_task(recipe.task) and properties_of(task_class(recipe.task)).reads_text:
        shapes = texts  # rows of text do not reach the towers
    table = next((size for name, size in shapes.items() if _is_one(name.rpartition(".")[0], EMBEDDINGS)), ())
    targets = {name for name, size in shapes.items() if _is_target(recipe, name, size, towers)}
    if table and not any(is_in(name, HEADS) for name in shapes):  # tied: a head of its own gets a copy
        if any(ending.rpartition(".")[2] in HEADS for ending in section.modules_to_save):
            count, tables = math.prod(table), table[1]
        elif any(is_named(section, head) for head in HEADS):
            count, adapts_head = section.r * sum(table) + (table[0] if section.use_dora else 0), True
    if not targets and not adapts_head:
        targets = {name for name, size in shapes.items() if is_inside(name, size)}
    for name, size in shapes.items():
        module = name.rpartition(".")[0]
        if any(is_saved(name, section.modules_to_save) for name in _possible_names(module, towers)):
            count += math.prod(size)
        elif name in targets:
            outputs = size[1] if _is_one(module, (*TRANSPOSED, *EMBEDDINGS)) else size[0]
            count += section.r * sum(size) + (outputs if section.use_dora else 0)
        if recipe.model.new_tokens and _is_one(module, (*EMBEDDINGS, *HEADS)) and len(size) == 2:
            tables += size[1]
    return count + len(recipe.model.new_tokens) * tables


def layer_matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return the shapes of the matrices of one layer under the names that Llama models have.

    Args:
        shape: The sizes of the layer.
    """
    keys, inner = (shape.keys, shape.hidden), (shape.inner, shape.hidden)
    attention = {"q_proj": (shape.attention, shape.hidden), "k_proj": keys, "v_proj": keys}
    attention["o_proj"] = (shape.hidden, shape.attention)
    mlp = {"gate_proj": inner} if shape.has_gate else {}
    mlp |= {"up_proj": inner, "down_proj": (shape.hidden, shape.inner)}
    return {f"self_attn.{name}": size for name, size in attention.items()} | {
        f"mlp.{name}": size for name, size in mlp.items()
    }


def named_matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return the shapes of all matrices of a model under the names that Llama models have.

    Args:
        shape: The sizes of the layers.
    """
    names = layer_matrices(shape)
    layers = {
        f"model.layers.{layer}.{name}.weight": size for layer in range(shape.layers) for name, size in names.items()
    }
    tables = ["model.embed_tokens"] if shape.ties_head else ["model.embed_tokens", "lm_head"]
    table = (shape.vocabulary, shape.hidden)
    return layers | ({f"{name}.weight": table for name in tables} if shape.vocabulary else {})


def _is_tower(name: str) -> bool:
    """Return whether a name belongs to a part of a model that reads images or sound."""
    return any(part in OTHER_TOWERS for part in name.split("."))


def _is_target(recipe: Recipe, name: str, size: Sequence[int], towers: bool) -> bool:
    """Return whether a weight is a matrix of a module that gets an adapter."""
    section, module = recipe.adapter, name.rpartition(".")[0]
    if len(size) != 2 or not name.endswith(".weight") or _is_inside_any(module, section.exclude_modules, towers):
        return False
    if str(section.target_modules).lower() == ALL_LINEAR:
        return is_inside(name, size)
    return any(is_named(section, name) for name in _possible_names(module, towers))


def _possible_names(module: str, towers: bool) -> list[str]:
    """Return the names that a module of the files may have in the model."""
    prefix = next((prefix for prefix in STORED_PREFIXES if module.startswith(prefix)), "")
    prefixes = (*PREFIXES, *(["model.language_model."] if towers and not _is_tower(module) else []))
    parts = module.removeprefix(prefix).rpartition(".")
    lasts = HEADS if parts[2] in HEADS else parts[2:]  # GPT-NeoX stores its head under another name
    return [module, *(f"{other}{parts[0]}{parts[1]}{last}" for other in prefixes for last in lasts)]


def _is_inside_any(module: str, endings: Sequence[str], towers: bool) -> bool:
    """Return whether a module of the files, or one around it, has a name with one of the endings."""
    return any(is_in(name, endings) for name in _possible_names(module, towers))


def _is_one(module: str, endings: Sequence[str]) -> bool:
    """Return whether the name of a module ends with one of the endings."""
    return any(ends_with(ending, [module]) for ending in endings)
