"""Small classifiers of texts and images of many architectures, with the dropout of their configurations."""

from __future__ import annotations

from typing import Any

from torch import nn

from ftcli.tiny_models import build_tiny

TEXT = {
    "hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 32,
    "pad_token_id": 0, "num_labels": 2, "max_position_embeddings": 64,
}  # fmt: skip
IMAGE = {
    "hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 32,
    "patch_size": 8, "num_labels": 3,
}  # fmt: skip
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3, "num_stages": 2, "embedding_size": 8}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
# By model type: its class, and what its configuration needs.
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AlbertForSequenceClassification", {**TEXT, "embedding_size": 8}),
    "bert": ("BertForSequenceClassification", TEXT),
    "camembert": ("CamembertForSequenceClassification", TEXT),
    "deberta": ("DebertaForSequenceClassification", TEXT),
    "deberta-v2": ("DebertaV2ForSequenceClassification", TEXT),
    "distilbert": (
        "DistilBertForSequenceClassification",
        {"dim": 16, "n_layers": 6, "n_heads": 2, "hidden_dim": 24, "vocab_size": 32, "pad_token_id": 0,
         "num_labels": 2, "max_position_embeddings": 64},
    ),
    "electra": ("ElectraForSequenceClassification", {**TEXT, "embedding_size": 8}),
    "modernbert": ("ModernBertForSequenceClassification", {**TEXT, "local_attention": 8}),
    "mpnet": ("MPNetForSequenceClassification", TEXT),
    "roberta": ("RobertaForSequenceClassification", {**TEXT, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaForSequenceClassification", {**TEXT, "pad_token_id": 1}),
    "beit": ("BeitForImageClassification", IMAGE),
    "convnext": ("ConvNextForImageClassification", {**STAGES, "drop_path_rate": 0.2}),
    "convnextv2": ("ConvNextV2ForImageClassification", {**STAGES, "drop_path_rate": 0.2}),
    "deit": ("DeiTForImageClassification", IMAGE),
    "dinov2": ("Dinov2ForImageClassification", {**IMAGE, "drop_path_rate": 0.2}),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", {"image_size": 32, "depth_multiplier": 0.1, "num_labels": 3}),
    "regnet": ("RegNetForImageClassification", {**STAGES, "groups_width": 4}),
    "resnet": ("ResNetForImageClassification", STAGES),
    "swin": ("SwinForImageClassification", {**SWIN, "num_labels": 3}),
    "swinv2": ("Swinv2ForImageClassification", {**SWIN, "num_labels": 3}),
    "vit": ("ViTForImageClassification", {**IMAGE, "hidden_dropout_prob": 0.1}),
}  # fmt: skip


def small_classifier(kind: str) -> nn.Module:
    """Return a classifier in training mode, with the same random weights at each call."""
    name, settings = CLASSIFIERS[kind]
    model: nn.Module = build_tiny(name, **settings)
    return model.train()


def reads_texts(kind: str) -> bool:
    """Return whether a classifier reads texts."""
    return CLASSIFIERS[kind][0].endswith("ForSequenceClassification")
