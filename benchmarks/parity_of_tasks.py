"""Compare the curves of several tasks over profiles: adapters, packed rows, preferences, KTO, rewards and images.

    python benchmarks/parity_of_tasks.py FOLDER [--kinds lora packed] [--precisions fp32 bf16] [--jobs 4]

Writes models with random weights, rows and a recipe for each kind into FOLDER, and runs `ftcli parity` for each kind
and precision, several at a time. Prints their tables. The exit code is 1 if one does not hold. To try it without GPUs:
`--shape tiny --image-shape tiny-vit --cpu --kinds lora packed preference kto reward images resnet`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent
sys.path[:0] = [str(HOME), str(HOME.parent)]

ROWS, EVALUATED = 256, 32
LORA = {"type": "lora", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
PACKED = {"packing": True, "max_length": 1024}
PAIRS = {"learning_rate": 5e-6}  # as in the shipped recipes; their losses are steep functions of long sums
# What a recipe adds to the shared values of write_recipe. "images" and "resnet" have a model of their own.
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": LORA},
    "qlora": {"adapter": LORA, "model": {"quantization": {"load_in_4bit": True}}},
    "packed": {"data": PACKED},
    "packed_lora": {"adapter": LORA, "data": PACKED},
    "preference": {"task": "preference", "optimizer": PAIRS},
    "packed_preference": {"task": "preference", "data": {"padding_free": True}, "optimizer": PAIRS},
    "orpo": {"task": "preference", "task_options": {"losses": {"orpo": {"beta": 0.1}}}, "optimizer": PAIRS},
    "kto": {"task": "unpaired_preference", "optimizer": PAIRS},
    "reward": {"task": "reward", "optimizer": PAIRS},
    "images": {"task": "image_classification", "task_options": {"flip": 0.5, "mixup": 0.2}},
    "resnet": {
        "task": "image_classification",
        "model": {"batch_norm": "frozen"},
        "optimizer": {"name": "sgd", "learning_rate": 0.05},
    },
}
IMAGES = ("images", "resnet")


def add_recipe_options(parser: argparse.ArgumentParser, steps: int) -> None:
    """Add the options that `write_inputs` reads, with the default number of steps."""
    parser.add_argument("--shape", default="qwen3-0.6b", help="one of benchmarks/random_model.py")
    parser.add_argument("--image-shape", default="vit-b16", help="one of benchmarks/cells/models.py")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--learning-rate", type=float, help="of all kinds; default: each kind's own")
    parser.add_argument("--cpu", action="store_true")


def write_inputs(folder: Path, kind: str, parsed: argparse.Namespace) -> Path:
    """Write the rows and the recipe of a kind, and its model if it is missing; return the path of the recipe."""
    place = folder / kind
    place.mkdir(parents=True, exist_ok=True)
    model = folder / (("model-resnet" if kind == "resnet" else "model-vit") if kind in IMAGES else "model")
    if not model.exists():
        write_model(model, kind, parsed)
    if kind in IMAGES:
        from cells.rows import write_images

        write_images(place / "train", ROWS)
        write_images(place / "eval", EVALUATED)
        train, evaluated = place / "train", place / "eval"
    else:
        train, evaluated = place / "train.jsonl", place / "eval.jsonl"
        write_texts(train, kind, ROWS, seed=0)
        write_texts(evaluated, kind, EVALUATED, seed=1)
    values: dict[str, Any] = {
        "task": "sft",
        "model": {"name": str(model), "dropout": 0.0},
        "data": {"train": str(train), "eval": str(evaluated)},
        "batch": {"global_size": 16, "micro_size": 4},
        "train": {"max_steps": parsed.steps},
        "optimizer": {"learning_rate": 1e-4, "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup_steps": 0.2},
    }
    if kind not in IMAGES:
        values["data"]["max_length"] = 1024
    for section, added in KINDS[kind].items():
        values[section] = values.get(section, {}) | added if isinstance(added, dict) else added
    if parsed.learning_rate is not None:
        values["optimizer"]["learning_rate"] = parsed.learning_rate
    recipe = place / "recipe.yaml"
    recipe.write_text(json.dumps(values, indent=1))  # JSON is YAML
    return recipe


def write_model(folder: Path, kind: str, parsed: argparse.Namespace) -> None:
    """Write random weights of the shape of the command line, or of ResNet-50."""
    if kind == "resnet":
        from ftcli.data.assets.catalogue import fetch_asset

        name = "random-resnet-small" if parsed.shape == "tiny" else "random-resnet-50"
        shutil.copytree(fetch_asset(name), folder)
    elif kind == "images":
        from cells.models import write_model as write_classifier

        write_classifier(parsed.image_shape, folder)
    else:
        from random_model import write_model as write_language_model

        write_language_model(parsed.shape, folder)


def write_texts(path: Path, kind: str, count: int, seed: int) -> None:
    """Write rows of random words in the format of a kind, with a few to a few hundred characters."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 8))) for _ in range(200)]

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    lines = []
    for number in range(count):
        row: dict[str, Any] = {"prompt": text(20) + " "}
        if KINDS[kind].get("task") in ("preference", "reward"):
            row |= {"chosen": text(60), "rejected": text(60)}
        else:
            row |= {"completion": text(60)}
            if kind == "kto":
                row["label"] = number % 3 != 0
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))


def compare(recipe: Path, precision: str, parsed: argparse.Namespace) -> tuple[int, str]:
    """Run `ftcli parity` on a recipe; return its exit code and its table, or the end of its messages if it failed."""
    output = recipe.parent / f"parity-{precision}"
    profiles = parsed.profiles.split(",")
    if "quantization" in json.loads(recipe.read_text())["model"]:  # ZeRO refuses 4-bit weights
        profiles = [name for name in profiles if not name.startswith("zero")]
    line = [sys.executable, "-m", "ftcli", "parity", str(recipe), "--profiles", ",".join(profiles)]
    line += ["--num-processes", parsed.processes, "--micro-sizes", parsed.micro_sizes, "--output", str(output)]
    line += ["--set", f"precision={precision}", *(["--cpu"] if parsed.cpu else [])]
    done = subprocess.run(line, capture_output=True, text=True)
    for final in output.glob("*/final"):  # their weights are compared already
        shutil.rmtree(final)
    return done.returncode, done.stdout.strip() or done.stderr[-3000:]


def main() -> None:
    """Compare all kinds, and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--profiles", default="single,ddp,fsdp,zero2,zero3")
    parser.add_argument("--processes", default="2")
    parser.add_argument("--micro-sizes", default="4")
    parser.add_argument("--jobs", type=int, default=4, help="comparisons that run at the same time")
    add_recipe_options(parser, steps=12)
    parsed = parser.parse_args()
    recipes = [(kind, write_inputs(parsed.folder, kind, parsed)) for kind in parsed.kinds]
    failed = False
    with ThreadPoolExecutor(parsed.jobs) as pool:
        running = {
            pool.submit(compare, recipe, precision, parsed): f"{kind}, {precision}"
            for precision in parsed.precisions
            for kind, recipe in recipes
        }
        for future in as_completed(running):  # a machine may be lost before the last one is done
            code, table = future.result()
            failed = failed or code != 0
            print(f"{running[future]}: exit code {code}\n\n{table}\n", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
