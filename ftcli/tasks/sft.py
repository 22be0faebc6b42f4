"""Supervised fine-tuning of a causal language model on answers: chat messages, or prompt and completion.

Loss: negative log-likelihood summed over the tokens of the assistant's turns. B rows, T tokens, N trained tokens.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..errors import InputError
from .protocol import Batch, Row, RowError
from .tokens import attention_mask, encode_completion, encode_conversation, pad

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor, nn

    from ..recipe import Recipe

ROLES = ("system", "user", "assistant", "tool")


class Options(BaseModel):
    """Keys of task_options for sft."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    chat: Literal["auto", "never"] = Field(
        "auto",
        description="auto: a prompt and its completion become a user's and an assistant's turn when the tokenizer "
        "has a chat template; never: they are joined as plain text.",
    )


class Task:
    """Answers are trained, prompts are read."""

    item: Literal["token", "sample"] = "token"
    columns: tuple[str, ...] = ()
    auto_class = "AutoModelForCausalLM"
    peft_type: str | None = "CAUSAL_LM"

    def __init__(self, recipe: Recipe, options: Options) -> None:
        from ..models import load_tokenizer

        self.recipe, self.options = recipe, options
        self.tokenizer = load_tokenizer(recipe.model)

    def fingerprint(self) -> str:
        """Return a digest of the tokenizer, its special tokens and its chat template."""
        text = f"{self.tokenizer.backend_tokenizer.to_str()}{self.tokenizer.chat_template}"
        return hashlib.sha256(f"{text}{self.tokenizer.special_tokens_map}".encode()).hexdigest()

    def survey(self, rows: Dataset) -> dict[str, Any]:
        """Return nothing, rows do not depend on each other; raises `InputError` when no column can be an answer."""
        there = [name for name in rows.column_names if name != "id"]
        if "messages" not in there and not {"prompt", "completion"} <= set(there):
            raise InputError(
                f"data.train: no column 'messages', nor 'prompt' and 'completion', in {self.recipe.data.train.path}",
                hint=f"columns there: {', '.join(there)}; name yours in data.columns",
            )
        return {}

    def encode(self, row: Row, facts: dict[str, Any]) -> Row:
        """Return {"input_ids", "trained", "items"} of one conversation, cut to data.max_length."""
        ids, trained = self._render(row)
        ids, trained = ids[: self.recipe.data.max_length], trained[: self.recipe.data.max_length]
        return {"input_ids": ids, "trained": trained, "items": sum(trained[1:])}

    def _render(self, row: Row) -> tuple[list[int], list[bool]]:
        if row.get("messages") is not None:
            return self._render_turns(_checked_messages(row["messages"]))
        prompt, completion = row.get("prompt"), row.get("completion")
        if isinstance(prompt, list) and isinstance(completion, list):
            return self._render_turns(_checked_messages(prompt + completion))
        if prompt is None or completion is None:
            there = ", ".join(sorted(name for name, value in row.items() if value is not None and name != "id"))
            raise RowError(f"needs `messages`, or `prompt` and `completion`; it has {there or 'nothing'}")
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise RowError("`prompt` and `completion` must both be text, or both lists of messages")
        if not completion.strip():
            raise RowError("has an empty completion")
        if self.options.chat == "auto" and self.tokenizer.chat_template is not None:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            return encode_conversation(self.tokenizer, turns)
        return encode_completion(self.tokenizer, prompt, completion)

    def _render_turns(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        if self.tokenizer.chat_template is None:
            raise RowError("has messages, but the tokenizer has no chat template")
        return encode_conversation(self.tokenizer, messages)

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

    def encode_prompt(self, asked: str | list[dict[str, Any]]) -> list[int]:
        """Return the tokens of a prompt as rows are written: text is a user's turn where rows become turns."""
        from ..generation import encode_prompt

        return encode_prompt(self.tokenizer, asked, as_chat=self.options.chat == "auto")

    def probe(self, batch: Batch) -> Batch:
        """Return what the plain model takes to give logits."""
        return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages as the chat template takes them; raises `RowError` for anything else."""
    if not isinstance(messages, list) or not messages:
        raise RowError("messages must be a list of {role, content}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise RowError(f"message {number} has no text `content`")
        if message.get("role") not in ROLES:
            raise RowError(f"message {number} has role {message.get('role')!r}; known: {', '.join(ROLES)}")
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("no message is the assistant's, so nothing would be trained")
    return [{k: v for k, v in message.items() if v is not None} for message in messages]
