"""Random weights of a cell's shape, written once for all peers, with a tokenizer of as many words as its vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from random_model import SHAPES

LONGEST = 32768  # positions


def write_model(shape: str, folder: Path) -> None:
    """Write random bfloat16 weights, as models are handed out, drawn on the GPU if there is one."""
    import torch
    from transformers import AutoModelForCausalLM

    kind, sizes = SHAPES[shape]
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = kind(**{"tie_word_embeddings": True, **sizes}, **tokens, max_position_embeddings=LONGEST)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    partial = folder.with_name(f"{folder.name}.part")
    model.save_pretrained(partial)
    word_tokenizer(config.vocab_size).save_pretrained(partial)
    partial.rename(folder)


def word_tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer whose words are the numbers of its tokens; 0 is padding, 1 the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "</s>": 1, **{str(number): number for number in range(2, vocabulary)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", model_max_length=LONGEST
    )
