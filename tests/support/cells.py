"""Small recipes that cover many code paths, and a function that trains them on one process or under a profile."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftcli.config.recipe import Recipe

STEPS = 4
SAVED_AT = 5  # of the runs that are resumed


# Compares the trained model with its base, as preference losses do: before and after the pass that is trained.
CONTRAST = """
from ftcli import disable_adapter
from ftcli.tasks.sft import Options
from ftcli.tasks.sft import Task as Sft


class Task(Sft):
    def loss(self, model, batch):
        import torch

        with disable_adapter(model):
            before = super().loss(model, batch)
        losses = super().loss(model, batch)
        with disable_adapter(model):
            after = super().loss(model, batch)
        assert torch.equal(before, after) and not before.requires_grad
        return torch.nn.functional.softplus(losses - before)

    def eval_step(self, model, batch):
        values = super().eval_step(model, batch)
        with disable_adapter(model):
            base = super().eval_step(model, batch)
        return values | {"loss": values["loss"] - base["loss"]}
"""


# Calls the model twice before the one backward pass; its curve is that of sft.
TWO_PASSES = """
from ftcli.tasks.sft import Options
from ftcli.tasks.sft import Task as Sft


class Task(Sft):
    def loss(self, model, batch):
        import torch

        halves = zip(batch["positions"].tensor_split(2), batch["targets"].tensor_split(2))
        passes = [model(**batch | {"positions": p, "targets": t})["nll"] for p, t in halves]
        return torch.cat(passes)
"""


def write_inputs(folder: Path) -> None:
    """Write tiny models and rows of variable length; nothing is downloaded."""
    from PIL import Image

    from ftcli import testing

    testing.save_tiny_causal(folder / "tied")
    testing.save_tiny_causal(folder / "untied", tied=False)
    testing.save_tiny_encoder(folder / "encoder")
    testing.save_tiny_vit(folder / "vit")
    testing.save_tiny_mobilenet(folder / "mobilenet")
    testing.save_tiny_resnet(folder / "resnet")
    testing.save_tiny_vision_language(folder / "vision")
    (folder / "contrast.py").write_text(CONTRAST)
    (folder / "two_passes.py").write_text(TWO_PASSES)
    draw = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "eps"]

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    chats = [{"prompt": text(6), "completion": text(9)} for _ in range(42)]
    texts = [{"text": f"{label} {text(8)}", "label": label} for label in draw.choices(["x", "y", "z"], k=42)]
    for name, rows in (("chats", chats), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    thoughts = [chat | {"completion": f"<think>beta</think> {chat['completion']}"} for chat in chats]
    (folder / "thoughts.jsonl").write_text("\n".join(map(json.dumps, thoughts)) + "\n")
    _write_answers(folder)
    _write_weights_and_targets(folder)
    _write_faces(folder)
    for index in range(30):
        label = ["red", "green"][index % 2]
        (folder / "images" / label).mkdir(parents=True, exist_ok=True)
        shade = [draw.randint(0, 90) + (130 if channel == index % 2 else 0) for channel in range(3)]
        # Each pixel has its own colour. Channels that are constant in an image would make batch norm divide rounding by
        # nearly zero, and curves of two profiles would then be apart by more than rounding.
        texture = random.Random(index)
        pixels = bytes(value + texture.randint(0, 35) for _ in range(20 * 20) for value in shade)
        Image.frombytes("RGB", (20, 20), pixels).save(folder / "images" / label / f"{index}.png")


def _write_answers(folder: Path) -> None:
    """Write rows with compared, labelled, ranked, scored and rated answers of variable length."""
    draw = random.Random(1)
    words = ["alpha", "beta", "gamma", "delta", "eps"]

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    pairs = [{"prompt": text(6), "chosen": f"alpha {text(9)}", "rejected": f"beta {text(5)}"} for _ in range(42)]
    weighted = [pair | {"weight": round(draw.uniform(0.3, 3), 2), "margin": draw.random() - 0.3} for pair in pairs]
    labelled = [
        {"prompt": f"{text(4)} {index}", "completion": text(9), "label": draw.random() < 0.6} for index in range(42)
    ]
    ranked = [
        {"prompt": text(5), "responses": [f"{n} {text(7)}" for n in "abcd"[: 2 + index % 3]], "ranks": [1, 2, 2, 3]}
        for index in range(42)
    ]
    for row in ranked:
        row["ranks"] = row["ranks"][: len(row["responses"])]
    rated = [
        {
            "prompt": text(5),
            "completion": text(7),
            "attributes": {"right": draw.random(), "short": None if index % 3 else draw.random()},
        }
        for index in range(42)
    ]
    # Both answers of a pair are about as long, so an update changes the order of the pairs' log-ratios.
    letters = ["alpha", "gamma", "delta", "kappa", "sigma"]
    close = []
    for _ in range(42):
        size = draw.randint(1, 9)
        chosen, rejected = (" ".join(draw.choices(letters, k=size)) for _ in range(2))
        close.append({"prompt": text(6), "chosen": chosen, "rejected": f"{rejected}."})
    files = {"pairs": pairs, "weighted": weighted, "labelled": labelled, "ranked": ranked, "rated": rated}
    files |= {"close": close}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def _write_weights_and_targets(folder: Path) -> None:
    """Write chats with weights of rows and turns, and texts with several labels or a number."""
    draw = random.Random(2)
    words = ["alpha", "beta", "gamma", "delta", "eps"]

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    chats = []
    for index in range(42):
        turns = []
        for _ in range(1 + index % 2):
            turns += [{"role": "user", "content": text(4)}, {"role": "assistant", "content": text(7)}]
        turns[-1]["weight"] = round(draw.uniform(0.2, 2), 2)
        chats.append({"messages": turns, "weight": round(draw.uniform(0.3, 3), 2)})
    tags = [{"text": text(8), "label": sorted(draw.sample("pqr", draw.randint(0, 3)))} for _ in range(42)]
    grades = [{"text": text(8), "label": round(draw.gauss(0, 1), 3)} for _ in range(42)]
    for name, rows in {"weighted_chats": chats, "tags": tags, "grades": grades}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def _write_faces(folder: Path) -> None:
    """Write drawn faces of seven people, most of them with several pictures of other sizes and modes."""
    from PIL import Image, ImageDraw

    draw = random.Random(3)
    for person in range(7):
        skin, eyes, mouth = (draw.randint(*bounds) for bounds in ((120, 230), (2, 4), (3, 6)))
        for picture in range(1 if person == 6 else 5):
            size = draw.choice([(24, 24), (30, 24), (20, 26)])
            image = Image.new("RGB", size, (draw.randint(0, 90), 40, 60))
            pen, left, top = ImageDraw.Draw(image), draw.randint(2, 4), draw.randint(2, 4)
            pen.ellipse((left, top, left + 15, top + 17), fill=(skin, skin - 40, skin - 60))
            for eye in (left + 4, left + 10):
                pen.ellipse((eye, top + 5, eye + eyes, top + 5 + eyes), fill=(20 * person, 0, 0))
            pen.line((left + 4, top + 13, left + 4 + mouth, top + 13), fill=(90, 0, 0))
            path = folder / "faces" / f"person-{person}" / f"{picture}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.convert(["RGB", "L", "RGBA"][picture % 3]).save(path)


def cell(folder: Path, name: str, **changes: Any) -> Recipe:
    """Return one small recipe by name; `changes` replace whole sections."""
    sources = {
        "sft": "chats.jsonl",
        "contrast.py": "chats.jsonl",
        "two_passes.py": "chats.jsonl",
        "image_classification": "images",
        "preference": "pairs.jsonl",
        "unpaired_preference": "labelled.jsonl",
        "reward": "pairs.jsonl",
        "face_swap": "faces",
    }
    task, model, adapter = (CELLS | FURTHER_CELLS)[name]
    values: dict[str, Any] = {
        "task": str(folder / task) if task.endswith(".py") else task,
        "model": {"name": str(folder / model), "dropout": 0.0},
        "data": {"train": str(folder / sources.get(task, "texts.jsonl")), "eval_rows": 5, "max_length": 128},
        "adapter": adapter,
        "batch": {"global_size": 12, "micro_size": 3},
        "train": {"max_steps": STEPS},
        "optimizer": {"learning_rate": 5e-3, "weight_decay": 0.1, "max_grad_norm": 0.5},
        "schedule": {"name": "cosine", "warmup_steps": 2},
    }
    if task == "two_passes.py":
        values["model"]["gradient_checkpointing"] = "full"
    if task == "face_swap":
        sizes = {"image_size": 16, "channels": 8, "identity_size": 16, "blocks": 1, "same_person": 0.5}
        values["model"] = {}
        values["task_options"] = sizes | {"perceptual": str(folder / model)}
        values["optimizer"]["learning_rate"] = 1e-3  # the generator has random weights
        del values["data"]["max_length"]
    if task == "image_classification":
        values["task_options"] = {"flip": 0.5}
        del values["data"]["max_length"]  # it has no effect on images
    if name in OPTIONS:
        file, values["task_options"] = OPTIONS[name]
        values["data"]["train"] = str(folder / file)
    values = _with_sections(values, SECTIONS.get(name, {}))
    return Recipe.model_validate(values | changes)


def _with_sections(values: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe with the keys of each of `sections` set."""
    return values | {key: {**values[key], **section} for key, section in sections.items()}


MIXED = {"flip": 0.5, "crop_scale": [0.5, 1.0], "color_jitter": 0.2, "rand_augment": {"magnitude": 3}}
MIXED |= {"random_erasing": 0.2, "mixup": 0.2, "cutmix": 0.5, "label_smoothing": 0.1}
# name -> (file of rows, task_options)
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft-terms": ("weighted_chats.jsonl", {"label_smoothing": 0.1, "z_loss": 0.01}),
    "class-weights": ("texts.jsonl", {"class_weights": {"x": 0.5, "z": 3.0}, "label_smoothing": 0.1}),
    "multi-label": ("tags.jsonl", {"problem_type": "multi_label_classification"}),
    "regression": ("grades.jsonl", {"problem_type": "regression"}),
    "regression-lora": ("grades.jsonl", {"problem_type": "regression"}),
    "vit-mixed": ("images", MIXED),
    "image-weights": ("images", {"class_weights": "balanced", "label_smoothing": 0.1}),
}
# name -> sections with other keys. Without accumulation, sync has the same rows in a forward pass everywhere. Its steps
# are smaller, because the statistics of few rows make the rounding of bf16 several times larger with each large step.
SGD = {"name": "sgd", "nesterov": True, "learning_rate": 0.05}
SLOW = SGD | {"learning_rate": 0.02}
SECTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "resnet": {"optimizer": SGD},
    "resnet-sync": {"optimizer": SLOW, "model": {"batch_norm": "sync"}, "batch": {"micro_size": 12}},
    "resnet-train": {"optimizer": SGD, "model": {"batch_norm": "train"}},
    "resnet-lora": {"optimizer": SGD, "model": {"batch_norm": "train"}},
}
LORA = {"type": "lora", "r": 3, "lora_alpha": 6}
CELLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sft-tied": ("sft", "tied", {}),
    "sft-untied": ("sft", "untied", {}),
    "sft-lora": ("sft", "tied", LORA),
    "contrast-lora": ("contrast.py", "tied", LORA),
    "two-passes": ("two_passes.py", "tied", {}),
    "sft-dora": ("sft", "untied", LORA | {"use_dora": True}),
    "text": ("text_classification", "encoder", {}),
    "text-lora": ("text_classification", "encoder", LORA),
    "vit": ("image_classification", "vit", {}),
    "vit-mixed": ("image_classification", "vit", {}),
    "mobilenet": ("image_classification", "mobilenet", {}),
    "resnet": ("image_classification", "resnet", {}),
    "resnet-sync": ("image_classification", "resnet", {}),
    "faces": ("face_swap", "vit", {}),  # the model is a frozen network of the loss
}
# Trained and exported just as others are, so not in every matrix.
FURTHER_CELLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "pretrain": ("pretrain", "tied", {}),
    "resnet-train": ("image_classification", "resnet", {}),
    "resnet-lora": (
        "image_classification",
        "resnet",
        LORA | {"target_modules": ["convolution"], "modules_to_save": ["normalization"]},
    ),
    "sft-terms": ("sft", "tied", {}),
    "class-weights": ("text_classification", "encoder", {}),
    "multi-label": ("text_classification", "encoder", {}),
    "regression": ("text_classification", "encoder", {}),
    "image-weights": ("image_classification", "vit", {}),
    "regression-lora": ("text_classification", "encoder", LORA),
    "preference": ("preference", "tied", {}),
    "reward": ("reward", "tied", {}),
    "reward-lora": ("reward", "tied", LORA),
    "unpaired": ("unpaired_preference", "tied", {}),
    "unpaired-lora": ("unpaired_preference", "tied", LORA),
    "preference-lora": ("preference", "tied", LORA),
    "vision": ("sft", "vision", {}),
    "vision-lora": ("sft", "vision", LORA),
}


def train_cells(folder: Path, names: list[str], changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train each cell in this process (one rank of several, or the only one) and return its results."""
    return {name: train_recipe(cell(folder, name, **(changes or {})), look=look_inside) for name in names}


def train_cells_on_gpus(folder: Path, names: list[str], changes: dict[str, Any]) -> dict[str, Any]:
    """Do as `train_cells` does, each rank on its GPU, with float32 products in full precision."""
    return {name: train_recipe(cell(folder, name, **changes), cpu=False) for name in names}


def look_inside(run: Any) -> dict[str, Any]:
    """Return facts about this rank's weights after `prepare`."""
    from ftcli.models.structure import base_model_of

    model = run.hardware.unwrap(run.model)
    inner = base_model_of(model)
    output = inner.get_output_embeddings() if run.recipe.task == "sft" else None
    trained = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    return {
        "tied": output is not None and output.weight is inner.get_input_embeddings().weight,
        "buffers": {key: buffer.tolist() for key, buffer in model.named_buffers()},
        "empty": [key for key, value in model.state_dict(keep_vars=True).items() if value.is_meta],
        "optimized": trained == {id(p) for p in model.parameters() if p.requires_grad},
        "dtypes": {key: str(parameter.dtype) for key, parameter in model.named_parameters()},
    }


def train_recipe(
    recipe: Recipe, *, cpu: bool = True, look: Callable[[Any], dict[str, Any]] = lambda run: {}
) -> dict[str, Any]:
    """Return the curve, the evaluation, and the weights before and after of one recipe on this rank.

    `look` returns more facts, about the run before its first step.
    """
    from ftcli.loop import steps
    from ftcli.training.evaluation import evaluate
    from ftcli.training.setup import prepare

    run = prepare(recipe, cpu=cpu)
    insides = look(run)
    before = weights(run)
    rows = [
        {
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "learning_rate": step.learning_rate,
            "items": step.items,
            "samples": step.samples,
        }
        for step in steps(run)
    ]
    return {
        "insides": insides,
        "rows": rows,
        "eval": evaluate(run),
        "statistics": {n: b.tolist() for n, b in run.model.named_buffers() if n.endswith(("_mean", "_var"))},
        "type": run.hardware.distributed_type,
        "offloads": run.hardware.backend.offloads(run.hardware.accelerator),
        "fused": [group["fused"] for group in run.optimizer.param_groups],
        "before": {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in before.items()},
        "after": weights(run),
    }


def save_and_resume(
    folder: Path,
    names: list[str],
    changes: dict[str, Any],
    output: Path | None,
    sources: list[Path],
    at: int = SAVED_AT,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save each cell's checkpoint into `output` on the way, and resume from those of the sources, on this profile.

    Returns (cell -> its uninterrupted curve, source -> cell -> its curve after the checkpoint).
    """
    from ftcli.runtime.checkpoint_names import checkpoint_path

    saved = (
        {}
        if output is None
        else {name: save_cell(cell(folder, name, **changes), output / name, at=(at,)) for name in names}
    )
    resumed = {
        source.name: {
            name: resume_cell(cell(folder, name, **changes), checkpoint_path(source / name, at)) for name in names
        }
        for source in sources
    }
    return saved, resumed


def save_cell(recipe: Recipe, output: Path, at: tuple[int, ...] = (SAVED_AT,)) -> dict[str, Any]:
    """Train to the end without a pause, saving on the way; return the curve and the last weights."""
    from ftcli.loop import steps
    from ftcli.training.checkpointing import save_checkpoint
    from ftcli.training.setup import prepare

    run = prepare(recipe, cpu=True, output=output)
    rows = []
    for step in steps(run):
        rows.append((step.loss, step.grad_norm, step.samples))
        if step.number in at:
            save_checkpoint(run, step.number)
    return {"rows": rows, "after": weights(run)}


def resume_cell(recipe: Recipe, checkpoint: Path) -> dict[str, Any]:
    """Train the steps after a checkpoint; return their curve and the last weights."""
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    run = prepare(recipe, cpu=True, resume=checkpoint)
    rows = [(step.loss, step.grad_norm, step.samples) for step in steps(run)]
    return {"rows": rows, "after": weights(run)}


def weights(run: Any) -> dict[str, Any]:
    """Return the trained weights on the main rank, an empty dictionary elsewhere; a collective."""
    parameters = dict(run.hardware.parameters(run.model, trained_only=True))
    return {name: value.float().numpy().copy() for name, value in parameters.items() if value is not None}
