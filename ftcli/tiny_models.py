"""Build tiny real models and tokenizers for tests, without downloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 63, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_WEIGHTS = (2).to_bytes(8, "little") + b"{}"  # a valid safetensors file without tensors
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> Any:
    """Return a byte-level tokenizer of 258 tokens with a ChatML template. Its padding token is its end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<|im_start|>", "<|im_end|>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def build_tiny(name: str, **settings: Any) -> Any:
    """Return a model of transformers with random weights, the same at each call.

    Args:
        name: Name of the model's class in transformers.
        settings: Keys of its configuration.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**settings))


def save_tiny_causal(folder: Path, *, tied: bool = True, **sizes: int) -> Path:
    """Write a two-layer Llama and its tokenizer. Small numbers of processes do not divide its sizes.

    Args:
        folder: The folder to write.
        tied: Whether input and output embeddings are tied.
        sizes: Keys of LlamaConfig that replace the tiny sizes.

    Returns:
        The folder.
    """
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1, "tie_word_embeddings": tied}
    tiny = SIZES | {"vocab_size": 259, "num_key_value_heads": 2}
    return _save(build_tiny("LlamaForCausalLM", **tiny | sizes, **tokens), tiny_tokenizer(), folder)


def save_tiny_encoder(folder: Path) -> Path:
    """Write a two-layer BERT without a head and its tokenizer, and return the folder."""
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = build_tiny("BertModel", **SIZES, **dropout, vocab_size=259, pad_token_id=1)
    return _save(model, tiny_tokenizer(), folder)


def save_tiny_vit(folder: Path) -> Path:
    """Write a two-layer vision transformer for 16-pixel images and its image processor, and return the folder."""
    return _save(build_tiny("ViTModel", **SIZES, image_size=16, patch_size=8), _image_processor("ViT", 16), folder)


def save_tiny_mobilenet(folder: Path) -> Path:
    """Write a small MobileNetV2 (batch norm, no input embeddings) and its image processor, and return the folder."""
    sizes = {"image_size": 32, "depth_multiplier": 0.25, "min_depth": 8}
    model = build_tiny("MobileNetV2Model", **sizes, tf_padding=False)
    return _save(model, _image_processor("MobileNetV2", 32), folder)


def save_tiny_resnet(folder: Path) -> Path:
    """Write a small ResNet of bottleneck layers (batch norm) and an image processor, and return the folder.

    Its activations are smooth. With ReLU, an activation that is zero but for rounding has another gradient on another
    number of processes, and curves that should agree then differ by much more than rounding.
    """
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [1, 2]}
    return _save(
        build_tiny("ResNetModel", layer_type="bottleneck", hidden_act="silu", **sizes),
        _image_processor("ViT", 32),
        folder,
    )


def save_tiny_vision_language(folder: Path) -> Path:
    """Write a two-layer Gemma 3 with a vision tower, and the tokenizer of the other tiny models, and return the folder.

    Its class names layers of towers that it does not have.
    """
    text = SIZES | {"vocab_size": 259, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1}
    model = build_tiny(
        "Gemma3ForConditionalGeneration",
        text_config=text | tokens,
        vision_config=vision | {"image_size": 16, "patch_size": 8},
        mm_tokens_per_image=1,
        **tokens,
    )
    return _save(model, tiny_tokenizer(), folder)


def _image_processor(name: str, size: int) -> Any:
    import importlib

    module = importlib.import_module(f"transformers.models.{name.lower().replace('v2', '_v2')}")
    kind = getattr(module, f"{name}ImageProcessorPil", None) or getattr(module, f"{name}ImageProcessor")
    side = {"height": size, "width": size}
    return kind(size=side, crop_size=side, do_center_crop=False) if name != "ViT" else kind(size=side)


def save_hollow(folder: Path, **config: Any) -> Path:
    """Write a model folder without weights: config.json, an empty safetensors file and an empty tokenizer.json.

    It is enough for checks that do not load the model.

    Args:
        folder: The folder to write.
        config: Keys of config.json.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(NO_WEIGHTS)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def _save(model: Any, processor: Any, folder: Path) -> Path:
    """Write the files of `model.save_pretrained`, and those of the processor.

    `save_pretrained` of a model imports DeepSpeed if it is installed. This takes seconds and prints a line.
    """
    from ftcli.checkpoint.hf_shards import SHARD_SIZE, save_weights, shard_bytes

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.dtype, model.config.architectures = str(model.dtype).removeprefix("torch."), [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    named = {name for tensors in (model.named_parameters(), model.named_buffers()) for name, _ in tensors}
    weights = {name: value for name, value in model.state_dict().items() if name in named}  # tied weights once
    save_weights(model, weights, weights.items(), folder, shard_bytes(SHARD_SIZE))
    processor.save_pretrained(folder)
    return folder
