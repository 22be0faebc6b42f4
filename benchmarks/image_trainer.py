"""Compare image classification with transformers' Trainer: final accuracy, and steps per second as a ratio.

    python benchmarks/image_trainer.py [--models resnet vit] [--seeds 3] [--epochs 4]

Both programs train the same model folder (random weights, one seed) on the same images (digits of scikit-learn,
asset:digits) with the same image processor, optimizer, schedule, batch size, precision and one thread, without
random changes of images. The new head and the order of rows follow from the seed, in each program by its own generator.
Each run is a process of its own, and the two programs take turns. The first steps are not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent
sys.path[:0] = [str(HOME.parent)]

PROGRAMS = ("ftcli", "trainer")
WARM = 5  # steps that are not timed
ROWS, LABELS, SMOOTHING, WARMUP = 64, 10, 0.1, 0.1
# What is trained, and the keys of the section optimizer.
SGD = {"name": "sgd", "nesterov": True, "learning_rate": 0.1, "weight_decay": 5e-4, "max_grad_norm": None}
MODELS: dict[str, dict[str, Any]] = {
    "resnet": SGD,
    "vit": {"learning_rate": 1e-3, "weight_decay": 0.05, "max_grad_norm": 1.0},
}
VIT = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 192}
VIT |= {"image_size": 32, "patch_size": 4}


def main() -> None:
    """Train all runs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--run", help=argparse.SUPPRESS)  # one run, as JSON
    parsed = parser.parse_args()
    if parsed.run:
        print("\n" + json.dumps(train(**json.loads(parsed.run))))
        return
    with tempfile.TemporaryDirectory() as folder:
        inputs = make_inputs(Path(folder))
        for kind in parsed.models:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in PROGRAMS}
            for seed in range(parsed.seeds):
                for program in PROGRAMS if seed % 2 == 0 else reversed(PROGRAMS):
                    values = {"program": program, "kind": kind, "seed": seed, "epochs": parsed.epochs, **inputs}
                    found[program].append(in_a_process(values))
            print_table(kind, found)


def make_inputs(folder: Path) -> dict[str, str]:
    """Write the models, and return the folders of models and images."""
    import torch
    from transformers import ViTConfig, ViTModel

    from ftcli.data.assets.catalogue import fetch_asset

    resnet = fetch_asset("random-resnet-small")
    torch.manual_seed(0)
    ViTModel(ViTConfig(**VIT), add_pooling_layer=False).save_pretrained(folder / "vit")
    (folder / "vit" / "preprocessor_config.json").write_bytes((resnet / "preprocessor_config.json").read_bytes())
    digits = fetch_asset("digits")
    return {"resnet": str(resnet), "vit": str(folder / "vit"), "digits": str(digits)}


def in_a_process(values: dict[str, Any]) -> dict[str, float]:
    """Return the results of one run."""
    line = [sys.executable, __file__, "--run", json.dumps(values)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{values['kind']}, seed {values['seed']}, {values['program']}: {result}", file=sys.stderr)
    return result


def train(program: str, kind: str, seed: int, epochs: int, **folders: str) -> dict[str, float]:
    """Train one run and return its accuracy, and seconds and seconds of CPU time of a step."""
    function = train_with_ftcli if program == "ftcli" else train_with_trainer
    marks: list[tuple[float, float]] = []
    accuracy = function(folders[kind], Path(folders["digits"]), MODELS[kind], seed, epochs, lambda: marks.append(now()))
    (first, first_cpu), (last, last_cpu) = marks[WARM - 1], marks[-1]
    steps = len(marks) - WARM
    return {"accuracy": accuracy, "seconds": (last - first) / steps, "cpu": (last_cpu - first_cpu) / steps}


def now() -> tuple[float, float]:
    """Return the clock and the CPU time of this process."""
    return time.perf_counter(), time.process_time()


def train_with_ftcli(model: str, digits: Path, optimizer: dict[str, Any], seed: int, epochs: int, mark: Any) -> float:
    """Train with ftcli and return the accuracy."""
    import ftcli
    from ftcli.config.recipe import Recipe
    from ftcli.training.evaluation import evaluate

    recipe = Recipe.model_validate(
        {
            "task": "image_classification",
            "seed": seed,
            "task_options": {"label_smoothing": SMOOTHING},
            "model": {"name": model, "dropout": 0, "batch_norm": "train" if optimizer is SGD else "frozen"},
            "data": {"train": str(digits / "train"), "eval": str(digits / "test")},
            "batch": {"global_size": ROWS, "micro_size": ROWS},
            "train": {"epochs": epochs},
            "optimizer": optimizer,
            "schedule": {"name": "cosine", "warmup_steps": WARMUP},
        }
    )
    run = ftcli.prepare(recipe, cpu=True)
    for _ in ftcli.steps(run):
        mark()
    metrics = evaluate(run)
    assert metrics is not None
    return metrics["accuracy"]


def train_with_trainer(model: str, digits: Path, optimizer: dict[str, Any], seed: int, epochs: int, mark: Any) -> float:
    """Train with transformers' Trainer, as its example for image classification does, and return the accuracy."""
    import numpy as np
    import torch
    from datasets import load_dataset
    from transformers import (
        AutoImageProcessor,
        AutoModelForImageClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    class Marks(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            mark()

    set_seed(seed)
    processor = AutoImageProcessor.from_pretrained(model)

    def pixels(rows: dict[str, list[Any]]) -> dict[str, Any]:
        images = [image.convert("RGB") for image in rows["image"]]
        return {"pixel_values": processor(images, return_tensors="pt")["pixel_values"], "labels": rows["label"]}

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        labels = torch.tensor([row["labels"] for row in rows])
        return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": labels}

    rows = {
        split: load_dataset("imagefolder", data_dir=str(digits / split), split="train") for split in ("train", "test")
    }
    rows = {split: part.with_transform(pixels) for split, part in rows.items()}
    is_sgd = optimizer.get("name") == "sgd"
    steps = epochs * (len(rows["train"]) // ROWS)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            seed=seed,
            num_train_epochs=epochs,
            per_device_train_batch_size=ROWS,
            per_device_eval_batch_size=ROWS,
            dataloader_drop_last=True,
            remove_unused_columns=False,
            optim="sgd" if is_sgd else "adamw_torch_fused",
            optim_args="momentum=0.9,nesterov=True" if is_sgd else None,
            learning_rate=optimizer["learning_rate"],
            weight_decay=optimizer["weight_decay"],
            max_grad_norm=optimizer["max_grad_norm"] or 0.0,
            lr_scheduler_type="cosine",
            warmup_steps=round(WARMUP * steps),
            label_smoothing_factor=SMOOTHING,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=10,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=AutoModelForImageClassification.from_pretrained(model, num_labels=LABELS),
            args=arguments,
            train_dataset=rows["train"],
            eval_dataset=rows["test"],
            data_collator=collate,
            compute_metrics=lambda found: {"accuracy": float(np.mean(found.predictions.argmax(-1) == found.label_ids))},
            callbacks=[Marks()],
        )
        trainer.train()
        trainer.args.dataloader_drop_last = False
        accuracy: float = trainer.evaluate()["eval_accuracy"]
    return accuracy


def print_table(kind: str, found: dict[str, list[dict[str, float]]]) -> None:
    """Print accuracies of both programs, and ratios of their speed."""
    for program, runs in found.items():
        accuracies = [run["accuracy"] for run in runs]
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        each = ", ".join(f"{value:.4f}" for value in accuracies)
        mean = f"mean {statistics.fmean(accuracies):.4f}, standard deviation {spread:.4f}"
        speed = f"{1000 * statistics.median(run['seconds'] for run in runs):.0f} ms a step (median)"
        print(f"{kind}, {program}: accuracy {each}; {mean}; {speed}")
    ours, theirs = (found[program] for program in PROGRAMS)
    for name, key in (("steps per second", "seconds"), ("steps per second of CPU time", "cpu")):
        ratios = [b[key] / a[key] for a, b in zip(ours, theirs, strict=True)]
        listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{kind}: {name}, ftcli / trainer: {listed}; median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
