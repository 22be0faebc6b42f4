"""Write image models with random weights, for recipes that train from the start. Nothing is downloaded.

The shapes are those of the papers and of the models of the same name on the hub. transformers draws the weights, from a
fixed seed. torch and transformers are imported inside functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = Callable[[str], None]

SEED = 0
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def build_resnet_50(folder: Path, work: Path, report: Report) -> None:
    """Write a ResNet-50 (He et al. 2015) with the stride in its 3 x 3 convolutions, and a processor for 224 px.

    Args:
        folder: Folder for the model.
        work: Folder for temporary files.
        report: Called with lines for the log.
    """
    _write("ResNetModel", {}, 224, folder, report)


def build_resnet_small(folder: Path, work: Path, report: Report) -> None:
    """Write a ResNet of three basic layers, and a processor for 32 px.

    Args:
        folder: Folder for the model.
        work: Folder for temporary files.
        report: Called with lines for the log.
    """
    sizes = {"embedding_size": 32, "hidden_sizes": [32, 64, 128], "depths": [1, 1, 1], "layer_type": "basic"}
    _write("ResNetModel", sizes, 32, folder, report)


def build_vit_large(folder: Path, work: Path, report: Report) -> None:
    """Write a ViT-L/16 (Dosovitskiy et al. 2020), and a processor for 224 px.

    Args:
        folder: Folder for the model.
        work: Folder for temporary files.
        report: Called with lines for the log.
    """
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    _write("ViTModel", sizes, 224, folder, report)


def _write(name: str, sizes: dict[str, Any], side: int, folder: Path, report: Report) -> None:
    """Write a model without a head, and a processor that resizes to `side / 0.875` and crops the middle."""
    report(f"drawing the weights of a {name.removesuffix('Model')}, once")
    import torch
    import transformers

    kind = getattr(transformers, name)
    options = {"add_pooling_layer": False} if name == "ViTModel" else {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        model = kind(kind.config_class(**sizes), **options)
    model.save_pretrained(folder)
    processor = {
        "image_processor_type": "ConvNextImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": side},
        "crop_pct": 0.875,  # up to 384 px: resize to side / 0.875, then crop the middle
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        **IMAGENET,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2), encoding="utf-8")
