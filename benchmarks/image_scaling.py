"""Measure images per second of ResNet-50 and ViT-L/16 on one and more GPUs, and how long steps wait for images.

    python benchmarks/image_scaling.py FOLDER [--models resnet50 vit_large] [--processes 1 2] [--kinds jpg bmp]

Each line is a run of `ftcli train` on a shipped recipe with random weights and random images of 500 x 375 pixels, in
FOLDER. `jpg` images are decoded by the loader processes. `bmp` images need no decoding, so the difference is the cost
of decoding; both are cropped and changed as the recipe says. All runs of a model train the same number of images per
step. With `--cores-per-gpu` a run with one GPU has only its share of the processor. Figures are means over the steps
after the first ones, and the median speed of the log lines. To try it without GPUs: `--models tiny --cpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

SIZE = (500, 375)  # about the mean size of ImageNet's images
LABELS = 10
# Recipe, its model, images of a step and images of one forward pass.
MODELS = {
    "resnet50": ("image_classification/resnet50", "random-resnet-50", 512, 128),
    "vit_large": ("image_classification/vit_large", "random-vit-large", 256, 64),
    "tiny": ("smoke/resnet", "random-resnet-small", 16, 8),
}


def write_images(folder: Path, suffix: str, numbers: range) -> None:
    """Write images with these numbers: random patterns of 8 pixels, with noise, into one folder for each label."""
    import numpy as np
    from PIL import Image

    for number in numbers:
        random = np.random.default_rng(number)
        small = Image.fromarray(random.integers(0, 256, (SIZE[1] // 8, SIZE[0] // 8, 3), dtype=np.uint8))
        pixels = np.asarray(small.resize(SIZE), dtype=np.int16)
        pixels = np.clip(pixels + random.integers(-10, 11, pixels.shape, dtype=np.int16), 0, 255).astype(np.uint8)
        place = folder / f"label-{number % LABELS}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number:06}.{suffix}")


def make_images(folder: Path, suffix: str, count: int) -> Path:
    """Return the folder of images of one kind, and write it if it is missing."""
    path = folder / suffix
    if not path.exists():
        workers = os.cpu_count() or 1
        each = -(-count // workers)
        parts = [range(first, min(count, first + each)) for first in range(0, count, each)]
        partial = folder / f"{suffix}.part"
        with ProcessPoolExecutor(workers) as pool:
            list(pool.map(write_images, [partial] * len(parts), [suffix] * len(parts), parts))
        partial.rename(path)
    return path


def train(folder: Path, model: str, images: Path, processes: int, parsed: argparse.Namespace) -> dict[str, Any]:
    """Train a recipe and return medians of its log lines."""
    recipe, _, rows, micro_size = MODELS[model]
    profile = "single" if processes == 1 else "ddp"
    cores = (parsed.cores_per_gpu or (os.cpu_count() or 1) // processes) * processes
    rows = parsed.rows or rows
    output = folder / "-".join([model, images.name, str(processes), "cores", str(cores), str(rows), *parsed.set])
    values = {
        "data.train": images,
        "data.eval": "null",
        "data.workers": parsed.workers or max(1, cores // processes - 1),
        "batch.global_size": rows,
        "batch.micro_size": micro_size,
        "train.epochs": "null",
        "train.max_steps": parsed.steps,
        "evaluate.at_start": "false",
        "evaluate.every_steps": "null",
        "checkpoint.every_steps": "null",
        "checkpoint.keep_best": "null",
        "log.every_steps": 5,
        **({"precision": "fp32"} if parsed.cpu else {}),
    }
    line = [sys.executable, "-m", "ftcli", "train", recipe, "--profile", profile, "--output", str(output)]
    line += ["--num-processes", str(processes)] if processes > 1 else []
    line += ["--cpu"] if parsed.cpu else []
    for setting in [f"{key}={value}" for key, value in values.items()] + parsed.set:
        line += ["--set", setting]
    if parsed.cores_per_gpu:
        line = ["taskset", "--cpu-list", f"0-{cores - 1}", *line]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)}\n{done.stderr[-4000:]}")
    logged = [json.loads(text) for text in (output / "metrics.jsonl").read_text().splitlines()]
    steady = [row for row in logged if "rows_per_second" in row and row["step"] > parsed.warm][:-1]
    # Lines have equally many images, so their times are proportional to this.
    times = [1 / row["rows_per_second"] for row in steady]
    return {
        "model": model,
        "images": images.name,
        "processes": processes,
        "cores": cores,
        "rows of a step": rows,
        "settings": parsed.set,
        "images a second": statistics.harmonic_mean(row["rows_per_second"] for row in steady),
        "median": statistics.median(row["rows_per_second"] for row in steady),
        "data wait": sum(row["data_wait_share"] * time for row, time in zip(steady, times, strict=True)) / sum(times),
        "first loss": logged[0]["loss"],
        "last loss": [row["loss"] for row in logged if "loss" in row][-1],
    }


def main() -> None:
    """Train all runs, and print one line of JSON for each, with the ratio to one process."""
    from ftcli.data.assets.catalogue import fetch_asset

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["resnet50", "vit_large"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--kinds", nargs="+", choices=("jpg", "bmp"), default=["jpg", "bmp"])
    parser.add_argument("--images", type=int, default=4096, help="number of images")
    parser.add_argument("--rows", type=int, help="images of a step, such as 4096 for ViT-L/16 as in its recipe")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warm", type=int, default=15, help="steps that are not counted")
    parser.add_argument("--workers", type=int, help="loader processes of each process; absent: all its cores but one")
    parser.add_argument(
        "--cores-per-gpu",
        type=int,
        help="cores that a run may use for each process, as where a scheduler divides machines; absent: all cores",
    )
    parser.add_argument(
        "--set", action="append", default=[], help="KEY=VALUE of the recipe, such as model.cuda_graphs=true"
    )
    parser.add_argument("--facts", type=Path, help="file that receives a JSON line for each run")
    parser.add_argument("--cpu", action="store_true")
    parsed = parser.parse_args()
    parsed.folder.mkdir(parents=True, exist_ok=True)
    for model in parsed.models:
        fetch_asset(MODELS[model][1])
        for kind in parsed.kinds:
            images = make_images(parsed.folder, kind, parsed.images)
            alone: float | None = None
            for processes in parsed.processes:
                try:
                    found = train(parsed.folder, model, images, processes, parsed)
                except RuntimeError as error:  # the other runs still start
                    print(error, file=sys.stderr, flush=True)
                    continue
                if processes == 1:
                    alone = found["images a second"]
                elif alone is not None:
                    found["times one process"] = found["images a second"] / alone
                print(json.dumps(found), flush=True)
                if parsed.facts is not None:
                    with parsed.facts.open("a") as file:
                        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
