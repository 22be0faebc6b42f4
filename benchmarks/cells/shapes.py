"""The sizes of the models of cells, by name: type of the model, and what its configuration sets. Imports nothing."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": (
        "llama",
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512},
    ),
    "smollm2-135m": (
        "llama",
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3, "vocab_size": 49152},
    ),
    "qwen3-0.6b": (
        "qwen3",
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    ),
    "llama-3.2-1b": (
        "llama",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    ),
    "llama-3.2-3b": (
        "llama",
        {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
    ),
    "llama-3.1-8b": (
        "llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False},
    ),
}  # fmt: skip
# The sizes of BERT-base and ViT-B/16 are the defaults of transformers.
CLASSIFIER_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base": (
        "bert",
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
         "vocab_size": 30522},
    ),
    "vit-b16": (
        "vit",
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
         "image_size": 224, "patch_size": 16},
    ),
}  # fmt: skip


def configuration(shape: str) -> dict[str, Any]:
    """Return the configuration of a shape, as its config.json has it."""
    kind, sizes = (SIZES | CLASSIFIER_SIZES)[shape]
    return {"model_type": kind, "tie_word_embeddings": True, **sizes}
