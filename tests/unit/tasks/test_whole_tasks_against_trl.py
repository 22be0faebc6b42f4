"""Whole tasks and TRL's trainers: the same rows and weights give the same tokens, loss, and gradient of every weight.

Both sides tokenize the rows themselves. TRL also trains the line break that the chat template writes after the end of
an answer. It is taken out of TRL's mask here, because no model has to generate it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.training.batches.dataloaders import Rows
from ftcli.training.setup import prepare

from ...support.cells import cell, write_inputs

ROWS = 6
CLOSE = {"rtol": 2e-5, "atol": 1e-6}
SETTINGS = {
    "per_device_train_batch_size": ROWS,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "max_length": None,
    "gradient_checkpointing": False,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models, and files of six rows of messages."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    for name, sides in (("pairs", ("chosen", "rejected")), ("labelled", ("completion",))):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()[:ROWS]]
        for row in rows:
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
            row |= {side: [{"role": "assistant", "content": row[side]}] for side in sides}
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Ours:
    """A run of ftcli on all rows of a file, whose weights have left those of the reference."""

    def __init__(self, folder: Path, name: str, file: str, **changes: Any) -> None:
        data = {"train": str(folder / f"{file}.jsonl"), "max_length": 128}
        batch = {"global_size": ROWS, "micro_size": ROWS}
        self.run: Any = prepare(cell(folder, name, data=data, batch=batch, **changes), cpu=True)
        self.raw = [json.loads(line) for line in (folder / f"{file}.jsonl").read_text().splitlines()]
        self.weights = {name: value.detach().clone() for name, value in self.run.model.named_parameters()}
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for value in self.run.model.parameters():
                value += 0.05 * torch.randn(value.shape, generator=generator)
        rows = Rows(self.run.rows.train, self.run.task, training=True, columns=self.run.rows.derived["train"])
        self.rows = [rows[0, number][0] for number in range(ROWS)]
        self.batch = self.run.task.collate(self.rows)

    def terms(self) -> dict[str, Any]:
        """Return the mean of each term over the rows, before its weight."""
        task, further = self.run.task, []
        if hasattr(task, "first_pass"):
            from ftcli.tasks.protocol import Seen

            with torch.no_grad():
                further = [Seen(task.first_pass(self.run.model, self.batch), torch.arange(ROWS))]
        counts = task.count(self.batch)
        losses = task.loss(self.run.model, self.batch, *further)
        return {name: losses[name].sum() / counts[term.count_name] for name, term in task.terms.items()}

    def gradients(self, loss: Any) -> dict[str, Any]:
        """Return the gradient of every weight of a loss."""
        return dict(zip(self.weights, torch.autograd.grad(loss, list(self.run.model.parameters())), strict=True))

    def plain(self, auto_class: str, folder: Path, *, moved: bool, **kwargs: Any) -> Any:
        """Return the plain model of transformers with the reference's weights, or with those of the run."""
        import transformers

        model = getattr(transformers, auto_class).from_pretrained(folder / "tied", dtype=torch.float32, **kwargs)
        values = dict(self.run.model.named_parameters()) if moved else self.weights
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name])
        return model


def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "tied")


def assert_same(ours: Ours, our_loss: Any, model: Any, their_loss: Any) -> None:
    """Compare two losses and the gradient of every weight."""
    torch.testing.assert_close(our_loss, their_loss, **CLOSE)
    names = [name for name, _ in model.named_parameters()]
    theirs = dict(zip(names, torch.autograd.grad(their_loss, list(model.parameters())), strict=True))
    for name, gradient in ours.gradients(our_loss).items():
        torch.testing.assert_close(gradient, theirs[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def without_line_break(batch: dict[str, Any], mask: str, ids: str, line_break: int) -> None:
    """Take the last trained token of each row out of TRL's mask, after a check that it is the line break."""
    for row, (tokens, is_trained) in enumerate(zip(batch[ids], batch[mask], strict=True)):
        last = int(is_trained.nonzero()[-1])
        assert int(tokens[last]) == line_break
        batch[mask][row, last] = 0


def our_order(batch: dict[str, Any], mask: Any) -> list[tuple[list[int], list[bool]]]:
    """Return the tokens of each row of a padded batch, and which are trained."""
    lengths = batch["attention_mask"].sum(1).tolist()
    return [
        (ids[:length].tolist(), trained[:length].tolist())
        for ids, trained, length in zip(batch["input_ids"], mask.bool(), lengths, strict=True)
    ]


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "nca_pair", "apo_zero", "aot"])
def test_preference_equals_dpo_trainer(name: str, inputs: Path, tmp_path: Path, trl: Any) -> None:
    from datasets import Dataset

    ours = Ours(inputs, "preference", "pairs", task_options={"losses": {name: {"beta": 0.3}}})
    model, reference = (ours.plain("AutoModelForCausalLM", inputs, moved=moved) for moved in (True, False))
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=reference,
        args=trl.DPOConfig(output_dir=str(tmp_path), loss_type=[name], beta=0.3, **SETTINGS),
        train_dataset=Dataset.from_list(ours.raw),
        processing_class=tokenizer(inputs),
    )
    collated = trainer.data_collator([trainer.train_dataset[number] for number in range(ROWS)])
    without_line_break(collated, "completion_mask", "input_ids", tokenizer(inputs)("\n")["input_ids"][-1])
    expected = our_order(collated, collated["completion_mask"])
    for number, row in enumerate(ours.rows):
        middle = row["chosen_length"]
        for place, part in ((number, slice(None, middle)), (ROWS + number, slice(middle, None))):
            assert expected[place] == (row["input_ids"][part], row["trained"][part])
    (loss,) = ours.terms().values()
    assert_same(ours, loss, model, trainer.compute_loss(model, collated))


@pytest.mark.parametrize("name", ["cpo", "simpo", "orpo"])
def test_preference_without_reference_equals_cpo_and_orpo_trainer(
    name: str, inputs: Path, tmp_path: Path, trl: Any
) -> None:
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    ours = Ours(inputs, "preference", "pairs", task_options={"losses": {name: {"beta": 0.3}}, "likelihood": 1.0})
    model = ours.plain("AutoModelForCausalLM", inputs, moved=True)
    common: Any = {"output_dir": str(tmp_path), "beta": 0.3, **SETTINGS, "max_length": 128}
    texts = [{side: row[side][0]["content"] for side in ("prompt", "chosen", "rejected")} for row in ours.raw]
    given: Any = {
        "model": model,
        "train_dataset": Dataset.from_list(texts),
        "processing_class": tokenizer(inputs),
    }
    if name == "orpo":
        trainer = ORPOTrainer(args=ORPOConfig(**common), **given)
    else:
        kind = {"cpo": "sigmoid", "simpo": "simpo"}[name]
        further = {"simpo_gamma": 1.0} if name == "simpo" else {}
        trainer = CPOTrainer(args=CPOConfig(loss_type=kind, cpo_alpha=1.0, **further, **common), **given)
    # TRL's tokenization adds another end token, so the trainer is given ftcli's tokens.
    batch = ours.batch
    mask = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    for number, row in enumerate(ours.rows):
        middle = row["chosen_length"]
        for place, part in ((2 * number, slice(None, middle)), (2 * number + 1, slice(middle, None))):
            mask[place, : len(row["trained"][part])] = torch.tensor(row["trained"][part])
    labels = batch["input_ids"].masked_fill(~mask, -100)
    values = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}
    results = {
        f"{side}_{key}": value[place::2]
        for place, side in enumerate(("chosen", "rejected"))
        for key, value in values.items()
    }
    terms = ours.terms()
    if name != "orpo":
        assert_same(ours, terms[name] + terms["nll"], model, trainer.get_batch_loss_metrics(model, results)[0])
        return
    # TRL's likelihood is a mean over the tokens of prompt and answer.
    their_loss, metrics = trainer.get_batch_loss_metrics(model, results)
    likelihood = trainer.concatenated_forward(model, results)[4]
    assert metrics["nll_loss"] == pytest.approx(likelihood.item()) != pytest.approx(terms["nll"].item(), rel=1e-3)
    assert_same(ours, terms[name], model, their_loss - likelihood)


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_unpaired_preference_equals_kto_trainer(name: str, inputs: Path, tmp_path: Path, trl: Any) -> None:
    from datasets import Dataset

    options = {"loss": name, "beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.5}
    ours = Ours(inputs, "unpaired", "labelled", task_options=options)
    model, reference = (ours.plain("AutoModelForCausalLM", inputs, moved=moved) for moved in (True, False))
    weights = {key: options[key] for key in ("beta", "desirable_weight", "undesirable_weight")}
    trainer = trl.KTOTrainer(
        model=model,
        ref_model=reference,
        args=trl.KTOConfig(output_dir=str(tmp_path), loss_type=name, **weights, **SETTINGS),
        train_dataset=Dataset.from_list(ours.raw),
        processing_class=tokenizer(inputs),
    )
    examples = [dict(trainer.train_dataset[number]) for number in range(ROWS)]
    for example, row in zip(examples, ours.rows, strict=True):
        own = row["own_length"]
        prompt = example["prompt_ids"]
        assert row["input_ids"][:own] == prompt + example["completion_ids"]
        if name == "kto":  # with the same partners
            example["KL_completion_ids"] = row["input_ids"][own + len(prompt) :]
    collated = trainer.data_collator(examples)
    line_break = tokenizer(inputs)("\n")["input_ids"][-1]
    for prefix in ("", "KL_") if name == "kto" else ("",):
        without_line_break(collated, f"{prefix}completion_mask", f"{prefix}input_ids", line_break)
    (loss,) = ours.terms().values()
    assert_same(ours, loss, model, trainer.compute_loss(model, collated))
    if name == "kto":
        assert trainer._metrics["train"]["kl"] != [0.0]


def test_reward_equals_reward_trainer(inputs: Path, tmp_path: Path, trl: Any) -> None:
    from datasets import Dataset

    ours = Ours(inputs, "reward", "pairs", task_options={"center": 0.01})
    model = ours.plain("AutoModelForSequenceClassification", inputs, moved=True, num_labels=1)
    trainer = trl.RewardTrainer(
        model=model,
        args=trl.RewardConfig(output_dir=str(tmp_path), center_rewards_coefficient=0.01, **SETTINGS),
        train_dataset=Dataset.from_list(ours.raw),
        processing_class=tokenizer(inputs),
    )
    collated = trainer.data_collator([trainer.train_dataset[number] for number in range(ROWS)])
    expected = [row[0] for row in our_order(collated, collated["attention_mask"])]
    ids = [expected[number] + expected[ROWS + number] for number in range(ROWS)]
    assert ids == [row["input_ids"] for row in ours.rows]
    terms = ours.terms()
    loss = sum(terms[name] * term.weight for name, term in ours.run.task.terms.items())
    assert_same(ours, loss, model, trainer.compute_loss(model, collated))
