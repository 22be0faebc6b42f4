"""Count the trained weights of a LoRA adapter from the shapes in the headers of weight files.

Modules are matched by their names, as `models/adapters.py` matches those of the model. Light: never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ftcli.models.adapter_targets import ALL_LINEAR, is_named
from ftcli.models.module_names import ends_with, is_in

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.models.estimates.shape import Shape

OUTSIDE_LAYERS = ("embed", "wte", "wpe", "lm_head")  # parts of the names of matrices without an adapter
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "shared")  # endings of the names of embeddings
HEADS = ("lm_head", "embed_out", "output")  # those of heads, which are not stored if they are tied
PREFIXES = ("", "model.", "transformer.")  # which files of a model may lack, and names in a pattern have
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
    section, count, tables = recipe.adapter, 0, 0
    table = next((math.prod(size) for name, size in shapes.items() if _is_one(name.rpartition(".")[0], EMBEDDINGS)), 0)
    heads = [ending for ending in section.modules_to_save if ending in HEADS]
    if heads and not any(is_in(name, heads) for name in shapes):
        count += table  # a tied head gets a copy of its own, and others may be stored under another name
    matches = any(_is_target(recipe, name.rpartition(".")[0], name, size) for name, size in shapes.items())
    for name, size in shapes.items():
        module = name.rpartition(".")[0]
        if is_in(module, section.modules_to_save):
            count += math.prod(size)
        elif _is_target(recipe, module, name, size) if matches else is_inside(name, size):
            outputs = size[1] if _is_one(module, TRANSPOSED) else size[0]
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


def _is_target(recipe: Recipe, module: str, name: str, size: Sequence[int]) -> bool:
    """Return whether a weight is a matrix of a module that gets an adapter."""
    section = recipe.adapter
    if len(size) != 2 or not name.endswith(".weight") or _is_one(module, section.exclude_modules):
        return False
    if str(section.target_modules).lower() == ALL_LINEAR:
        return is_inside(name, size)
    return any(is_named(section, prefix + module) for prefix in PREFIXES)


def _is_one(module: str, endings: Sequence[str]) -> bool:
    """Return whether the name of a module ends with one of the endings."""
    return any(ends_with(ending, [module]) for ending in endings)
