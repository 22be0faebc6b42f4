"""Write random weights of a shape once for all peers, with the tokenizer or image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from random_model import SHAPES

LONGEST = 163_840  # most positions of a model


CLASSIFIERS: dict[str, tuple[str, dict[str, int]]] = {
    "bert-base": ("Bert", {"vocab_size": 30522}),  # the sizes of BERT-base and ViT-B/16 are transformers' defaults
    "vit-b16": ("ViT", {}),
    "tiny-bert": (
        "Bert",
        {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 64},
    ),
    "tiny-vit": (
        "ViT",
        {"image_size": 16, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 64},
    ),
}  # fmt: skip
LABELS = ("even", "odd")


def write_model(shape: str, folder: Path) -> None:
    """Write random weights of a shape and its tokenizer or image processor. A GPU draws the weights if there is one."""
    import torch

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model, processor = classifier(shape) if shape in CLASSIFIERS else language_model(shape)
    partial = folder.with_name(f"{folder.name}.part")
    model.save_pretrained(partial)
    processor.save_pretrained(partial)
    partial.rename(folder)


def language_model(shape: str) -> tuple[Any, Any]:
    """Return a causal model in bfloat16, as models are published, and a tokenizer with the same vocabulary size."""
    import torch
    from transformers import AutoModelForCausalLM

    kind, sizes = SHAPES[shape]
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = kind(**{"tie_word_embeddings": True, **sizes}, **tokens, max_position_embeddings=LONGEST)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), word_tokenizer(config.vocab_size)


def classifier(shape: str) -> tuple[Any, Any]:
    """Return a float32 classifier without dropout, and its tokenizer or image processor."""
    import transformers

    kind, sizes = CLASSIFIERS[shape]
    labels: Any = {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = getattr(transformers, f"{kind}Config")(**sizes, **labels, **no_dropout)
    if kind == "ViT":
        side = {"height": config.image_size, "width": config.image_size}
        return transformers.ViTForImageClassification(config), transformers.ViTImageProcessor(size=side)
    return transformers.BertForSequenceClassification(config), word_tokenizer(config.vocab_size)


def word_tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer in which each word is the number of its token; 0 is padding, 1 the end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "</s>": 1, **{str(number): number for number in range(2, vocabulary)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", model_max_length=LONGEST
    )
