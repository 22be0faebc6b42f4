"""Supervised fine-tuning of a causal language model on answers: chat messages, or prompt and completion.

Loss: negative log-likelihood summed over the tokens of the assistant's turns. B rows, T tokens, N trained tokens.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..chat import TrainOn, encode_conversation, load_template
from ..formats import convert
from .protocol import Batch, Row, RowError
from .tokens import attention_mask, encode_completion, fit, pad

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor, nn

    from ..recipe import Recipe


class Options(BaseModel):
    """Keys of task_options for sft."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    chat: Literal["auto", "never"] = Field(
        "auto",
        description="auto: a prompt and its completion become a user's and an assistant's turn when the tokenizer "
        "has a chat template; never: they are joined as plain text.",
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="File with the Jinja chat template to use, and to save with the model, instead of the tokenizer's.",
    )
    train_on: TrainOn = Field(
        "assistant",
        description="assistant: every turn of the assistant, or the completion; last: only the last message, if it is "
        "the assistant's; all: every token. `train: true | false` in a message goes before it.",
    )


class Task:
    """Answers are trained, prompts are read."""

    item: Literal["token", "sample"] = "token"
    columns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ("messages", "completion")
    auto_class = "AutoModelForCausalLM"
    peft_type: str | None = "CAUSAL_LM"

    def __init__(self, recipe: Recipe, options: Options) -> None:
        from ..models import load_tokenizer

        self.recipe, self.options = recipe, options
        self.tokenizer = load_tokenizer(recipe.model)
        if options.chat_template is not None:
            load_template(self.tokenizer, options.chat_template)

    def fingerprint(self) -> str:
        """Return a digest of the tokenizer, its special tokens and its chat template."""
        text = f"{self.tokenizer.backend_tokenizer.to_str()}{self.tokenizer.chat_template}"
        return hashlib.sha256(f"{text}{self.tokenizer.special_tokens_map}".encode()).hexdigest()

    def survey(self, rows: Dataset) -> dict[str, Any]:
        """Return nothing: rows do not depend on each other."""
        return {}

    def encode(self, row: Row, facts: dict[str, Any]) -> list[Row]:
        """Return {"input_ids", "trained", "items"} of one conversation, made to fit data.max_length."""
        ids, trained = self._render(convert(row, self.formats))
        return fit(ids, trained, self.recipe.data.max_length, self.recipe.data.truncation or "truncate")

    def _render(self, example: Row) -> tuple[list[int], list[bool]]:
        """Return (ids, trained) of an example as `formats.convert` gives it."""
        tools = example.get("tools")
        if "messages" in example:
            return self._render_turns(example["messages"], tools)
        prompt, completion = example["prompt"], example["completion"]
        if self.options.chat == "auto" and self.tokenizer.chat_template is not None:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            return self._render_turns(turns, tools)
        ids, trained = encode_completion(self.tokenizer, prompt, completion)
        return ids, [True] * len(ids) if self.options.train_on == "all" else trained

    def _render_turns(self, messages: Any, tools: list[Any] | None) -> tuple[list[int], list[bool]]:
        if self.tokenizer.chat_template is None:
            raise RowError("has messages, but the tokenizer has no chat template")
        ids, trained = encode_conversation(self.tokenizer, messages, tools=tools, train_on=self.options.train_on)
        if self.options.train_on != "all" and not any(turn["role"] == "assistant" for turn in messages):
            raise RowError("no message is the assistant's, so nothing would be trained")
        return ids, trained

    def load_model(self, facts: dict[str, Any], **kwargs: Any) -> tuple[nn.Module, list[str]]:
        """Return the causal language model; it has no new head."""
        from ..models import load_model

        return load_model(self.auto_class, self.recipe, new_head=False, **kwargs)

    def finish_model(self, model: nn.Module) -> None:
        """Let the model return the negative log-likelihood of its targets."""
        from ..losses import return_token_nll

        return_token_nll(model)

    def blank(self, row: Row) -> Row:
        """Return the row with nothing trained."""
        return row | {"trained": [False] * len(row["trained"]), "items": 0}

    def collate(self, rows: list[Row]) -> Batch:
        """Return input_ids, attention_mask `[B, T]`; positions, targets `[N]`, positions into the flat `[B * T]`."""
        import torch

        ids = [list(row["input_ids"]) for row in rows]
        length = max(len(row) for row in ids)
        spots = [
            (b * length + t - 1, ids[b][t])  # the token before predicts this one
            for b, row in enumerate(rows)
            for t in range(1, len(ids[b]))
            if row["trained"][t]
        ]
        found = torch.tensor(spots, dtype=torch.int64).reshape(-1, 2)
        return {
            "input_ids": pad(ids, self.tokenizer.pad_token_id),
            "attention_mask": attention_mask([len(row) for row in ids]),
            "positions": found[:, 0].contiguous(),
            "targets": found[:, 1].contiguous(),
        }

    def count(self, batch: Batch) -> int:
        """Return N, the trained tokens."""
        return int(batch["targets"].numel())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed negative log-likelihood of the trained tokens."""
        nll: Tensor = model(**batch)["nll"]
        return nll.sum()

    def eval_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return loss and items of every row `[B]`."""
        import torch

        nll = model(**batch)["nll"]
        rows = batch["positions"] // batch["input_ids"].shape[1]
        zeros = torch.zeros(batch["input_ids"].shape[0], dtype=torch.float64, device=nll.device)
        return {
            "loss": zeros.index_add(0, rows, nll.double()),
            "items": zeros.index_add(0, rows, torch.ones_like(nll, dtype=torch.float64)),
        }

    def metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return loss per trained token, and perplexity = exp(loss)."""
        import numpy as np

        loss = float(rows["loss"].sum() / rows["items"].sum())
        return {"loss": loss, "perplexity": float(np.exp(loss))}

    def save_processor(self, folder: str) -> None:
        """Write the tokenizer with its chat template."""
        self.tokenizer.save_pretrained(folder)

    def probe(self, batch: Batch) -> Batch:
        """Return what the plain model takes to give logits."""
        return {name: batch[name] for name in ("input_ids", "attention_mask")}
