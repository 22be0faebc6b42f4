"""A small task with two terms of different counts and with notes, written as a file of its own for recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftcli.config.recipe import Recipe

from .cells import cell

# `loss` is a mean over trained tokens, `long` over the tokens of completions of more than two words, weighted by row.
# The notes are means over tokens and over rows, which micro-batches have different numbers of.
TWO_TERMS = """
from ftcli.tasks.protocol import COUNT_UNIT, Term
from ftcli.tasks.sft import Options
from ftcli.tasks.sft import Task as Sft


class Task(Sft):
    terms = {"loss": Term(0.75), "long": Term(0.5, "weights")}
    notes = {"nll": "items", "row_nll": "rows", "is_long": "rows"}

    def collate(self, rows):
        import torch

        counts = torch.tensor([int(row["items"]) for row in rows])
        weights = torch.where(counts > 12, (1 / counts / COUNT_UNIT).round() * COUNT_UNIT, 0.0)
        weights = torch.where(counts > 0, weights, 0.0)
        of_tokens = torch.arange(len(rows)).repeat_interleave(counts)
        further = {"row_weights": weights, "row_items": counts, "row_of_token": of_tokens}
        return super().collate(rows) | further

    def count(self, batch):
        rows = int((batch["row_items"] > 0).sum())
        return {"items": super().count(batch), "rows": rows, "weights": float(batch["row_weights"].double().sum())}

    def loss(self, model, batch):
        import torch

        names = ("row_weights", "row_items", "row_of_token")
        weights, items, of_token = (batch[name] for name in names)
        plain = {name: value for name, value in batch.items() if name not in names}
        nll = super().loss(model, plain)
        own = of_token == torch.arange(len(items), device=nll.device)[:, None]
        by_row = torch.where(own, nll, 0.0).sum(-1)
        mean = by_row / items.clamp(min=1)
        notes = {"nll": nll, "row_nll": mean, "is_long": items > 12}
        return {"loss": nll, "long": mean * weights, "notes": notes}

    def eval_step(self, model, batch):
        names = ("row_weights", "row_items", "row_of_token")
        return super().eval_step(model, {name: value for name, value in batch.items() if name not in names})
"""


# Adds a term that depends on all rows of the step. `moved` is 0 if both passes over a row draw the same dropout.
FIRST_PASS = (
    TWO_TERMS.replace("class Task(Sft)", "class TwoTerms(Sft)")
    + """

class Task(TwoTerms):
    terms = TwoTerms.terms | {"spread": Term(0.25, "rows")}
    notes = TwoTerms.notes | {"moved": "rows", "seen": "rows"}

    def first_pass(self, model, batch):
        import torch

        assert not torch.is_grad_enabled()
        return {"row_nll": self.row_nll(batch, super().loss(model, batch)["loss"])}

    def loss(self, model, batch, seen):
        import torch

        losses = super().loss(model, batch)
        row_nll, real = self.row_nll(batch, losses["loss"]), batch["row_items"] > 0
        values = seen.values["row_nll"]
        moved = (values[seen.positions] - row_nll).abs()
        spread = values.logsumexp(0) - row_nll
        zero = torch.zeros_like(row_nll)
        notes = {"moved": torch.where(real, moved, zero), "seen": torch.where(real, values.logsumexp(0), zero)}
        return losses | {"spread": torch.where(real, spread, zero), "notes": losses["notes"] | notes}

    def row_nll(self, batch, nll):
        import torch

        own = batch["row_of_token"] == torch.arange(len(batch["row_items"]), device=nll.device)[:, None]
        return torch.where(own, nll, 0.0).sum(-1) / batch["row_items"].clamp(min=1)
"""
)

# Adds a column that the starting weights give, and a term of the ratio to it: 1 before the first step.
DERIVED = (
    FIRST_PASS.replace("class Task(TwoTerms)", "class FirstPass(TwoTerms)")
    + """

class Task(FirstPass):
    terms = FirstPass.terms | {"drift": Term(0.125, "rows")}

    def collate(self, rows):
        import torch

        column = [float(row.get("start_nll", 0.0)) for row in rows]
        return super().collate(rows) | {"start_nll": torch.tensor(column)}

    def derive(self, model, batch):
        import torch

        assert not torch.is_grad_enabled() and not any(child.training for child in model.children())
        return {"start_nll": super().first_pass(model, self.plain(batch))["row_nll"]}

    def first_pass(self, model, batch):
        return super().first_pass(model, self.plain(batch))

    def loss(self, model, batch, seen):
        import torch

        losses = super().loss(model, self.plain(batch), seen)
        row_nll = seen.values["row_nll"][seen.positions]
        drift = torch.where(batch["row_items"] > 0, row_nll / batch["start_nll"], 0.0)
        return losses | {"drift": losses["loss"].sum() * 0 + drift}

    def eval_step(self, model, batch):
        drift = self.first_pass(model, batch)["row_nll"] / batch["start_nll"]
        return super().eval_step(model, self.plain(batch)) | {"drift": drift}

    def metrics(self, rows):
        return super().metrics(rows) | {"drift": float(rows["drift"].mean())}

    def plain(self, batch):
        return {name: value for name, value in batch.items() if name != "start_nll"}
"""
)

NAMES = {TWO_TERMS: "two_terms.py", FIRST_PASS: "first_pass.py", DERIVED: "derived.py"}


def two_terms(folder: Path, source: str = TWO_TERMS, **changes: Any) -> Recipe:
    """Return a recipe of the task, whose file is written into `folder`, with the inputs of `cells.write_inputs`."""
    file = folder / NAMES[source]
    if not file.exists():  # several ranks read the file, which is never half written then
        file.write_text(source)
    data = {"train": str(folder / "chats.jsonl"), "eval_rows": 5, "max_length": 128}
    return cell(folder, "sft-tied", **{"task": str(file), "data": data} | changes)
