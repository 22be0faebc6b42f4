"""Supervised fine-tuning of a causal language model on chats, or on pairs of prompt and completion.

The loss is the negative log-likelihood, summed over the tokens of the assistant's turns, and divided by their number.
Weights of rows and turns multiply it. Label smoothing and z-loss are further terms.
Shapes: B rows, T tokens, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ftcli.data.chat.encode import TrainOn, encode_weighted
from ftcli.data.chat.text_spans import decode_spans
from ftcli.data.formats import ONLY_IN_CHATS, convert
from ftcli.models.kernels.document_attention import (
    check_architecture,
    check_heads,
    confine_to_documents,
    is_flash,
    is_flat,
    prefers_flat,
)
from ftcli.runtime.errors import RowError
from ftcli.tasks.protocol import CAUSAL_LM, Batch, Row, Span
from ftcli.tasks.shared.batches import encode_completion, flat_batch, padded_batch
from ftcli.tasks.shared.chat_tokenizer import load_chat_tokenizer, tokenizer_digest
from ftcli.tasks.shared.token_weights import (
    OUTPUTS,
    LabelSmoothing,
    ZLoss,
    describe_weights,
    fit_weighted,
    regularizer_terms,
    weigh,
    weight_column,
    without_weights,
)

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe


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
        description="File with the Jinja chat template to use, and to save with the model, instead of the tokenizer's; "
        "or the name of one of ftcli's training templates: deepseek_r1, deepseek_v3_1, glm4_moe, nemotron_nano_v2, "
        "qwen3_5. Their answers have no tool calls.",
    )
    train_on: TrainOn = Field(
        "assistant",
        description="assistant: every turn of the assistant, or the completion; last: only the last message, if it is "
        "the assistant's; all: every token. `train: true | false` or a weight in a message overrides this key.",
    )
    label_smoothing: LabelSmoothing = 0.0
    z_loss: ZLoss = 0.0


class Task:
    """Supervised fine-tuning. Answers are trained; prompts are context."""

    item: Literal["token", "sample"] = "token"
    columns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ("messages", "completion")
    packs = True
    auto_class = CAUSAL_LM
    needs_tokenizer = True
    uses_vocabulary_logits = True
    default_truncation = "truncate"
    starting_recipe: Mapping[str, Mapping[str, Any]] = {
        "adapter": {"type": "lora", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
        "data": {"max_length": 1024},
        "batch": {"global_size": 16},
        "train": {"epochs": 1},
        "optimizer": {"learning_rate": 2e-4},
        "schedule": {"name": "cosine", "warmup_steps": 0.05},
    }
    peft_type: str | None = "CAUSAL_LM"
    metric_names: tuple[str, ...] = ("loss", "perplexity")
    uncompared_metrics: tuple[str, ...] = ("perplexity",)

    def __init__(self, recipe: Recipe, options: Options) -> None:
        self.recipe, self.options, self.is_flat = recipe, options, is_flat(recipe)
        self.tokenizer = load_chat_tokenizer(recipe, options.chat_template)
        self.variables = recipe.data.chat_template_kwargs
        self.regularizers = regularizer_terms(options)
        if self.regularizers:  # other modules look for this attribute
            self.terms = self.regularizers

    def fingerprint(self) -> str:
        """Return a digest of the tokenizer, its special tokens and its chat template."""
        return tokenizer_digest(self.tokenizer)

    def survey(self, rows: Dataset) -> dict[str, Any]:
        """Return an empty dictionary, because prepared rows depend on no other rows."""
        return {}

    def encode(self, row: Row, facts: dict[str, Any]) -> list[Row]:
        """Return the prepared rows of one example, each {"input_ids", "trained", "items"}.

        An example longer than data.max_length is truncated, split or dropped, as data.truncation requires.

        Raises:
            RowError: The row has another format, or its conversation cannot be rendered.
        """
        (result,) = self.encode_rows([row], facts)
        if isinstance(result, RowError):
            raise result
        return result

    def encode_rows(self, rows: list[Row], facts: dict[str, Any]) -> list[list[Row] | RowError]:
        """Return the result of `encode` for each row, or its `RowError`. Conversations are tokenized in one call."""
        results: list[Any] = []
        conversations: list[tuple[int, Row]] = []
        for number, row in enumerate(rows):
            try:
                example = self._as_conversation(convert(row, self.formats or Task.formats))
                results.append(None if "messages" in example else self._fit(example, *self._encode_plain(example)))
            except RowError as error:
                results.append(error)
            else:
                conversations += [(number, example)] * ("messages" in example)
        encoded = encode_weighted(
            self.tokenizer,
            [example["messages"] for _, example in conversations],
            tools=[example["tools"] for _, example in conversations],
            train_on=self.options.train_on,
            chat_template_kwargs=[
                {**self.variables, **example.get("chat_template_kwargs", {})} for _, example in conversations
            ],
        )
        for (number, example), result in zip(conversations, encoded, strict=True):
            results[number] = result if isinstance(result, RowError) else self._fit(example, *result)
        return results

    def _as_conversation(self, example: Row) -> Row:
        """Return {"messages", "tools"} of an example, or the example itself if it is encoded as plain text."""
        has_template = self.tokenizer.chat_template is not None
        if "messages" not in example:
            if self.options.chat == "never" or not has_template:
                return example
            prompt, answer = example["prompt"], example["completion"]
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            return {"messages": turns, "tools": example.get("tools"), **weight_column(example)}
        if "prompt" in example and self.options.chat == "never":
            raise RowError(ONLY_IN_CHATS)
        if not has_template:
            raise RowError("has messages, but the tokenizer has no chat template")
        return example

    def _encode_plain(self, example: Row) -> tuple[list[int], list[bool]]:
        """Return (ids, trained) of a prompt and its completion as plain text."""
        ids, trained = encode_completion(self.tokenizer, example["prompt"], example["completion"])
        return ids, [True] * len(ids) if self.options.train_on == "all" else trained

    def _fit(self, example: Row, ids: list[int], trained: list[bool], weights: list[float] | None = None) -> list[Row]:
        """Return rows of at most data.max_length tokens, with the weight of the example."""
        policy = self.recipe.data.truncation or self.default_truncation
        return fit_weighted(example, ids, trained, self.recipe.data.max_length, policy, weights)

    def describe_row(self, row: Row, facts: dict[str, Any]) -> tuple[list[Span], dict[str, str]]:
        """Return the spans of the text, and the weights of the row."""
        return decode_spans(self.tokenizer, row["input_ids"], row.get("trained")), describe_weights(row)

    def load_model(self, facts: dict[str, Any], **kwargs: Any) -> tuple[nn.Module, list[str]]:
        """Return the causal language model, and the names of its new modules, of which there are none.

        Raises:
            InputError: The recipe requests flat rows or a kernel that the model does not support.
        """
        from ftcli.models.load import load_configuration, load_model

        if is_flat(self.recipe) or is_flash(self.recipe.model.attn_implementation):
            config = load_configuration(self.recipe.model)
            check_heads(config, self.recipe)
            check_architecture(config, self.recipe)
        return load_model(self.auto_class, self.recipe, new_head=False, **kwargs)

    def finish_model(self, model: nn.Module) -> None:
        """Make the model return likelihoods instead of logits; with flat rows, confine attention to documents."""
        from ftcli.models.losses import return_token_nll

        kernel = self.recipe.model.attn_implementation
        self.is_flat = prefers_flat(model, self.recipe)
        if self.is_flat and not is_flash(kernel):
            confine_to_documents(model, kernel)
        return_token_nll(model, regularizers=bool(self.regularizers))

    def blank(self, row: Row) -> Row:
        """Return the row as padding, with no trained token."""
        return row | {"trained": [False] * len(row["trained"]), "items": 0}

    def collate(self, rows: list[Row]) -> Batch:
        """Return a batch of padded rows, or a flat batch of training rows if `finish_model` has enabled it."""
        if self.is_flat and rows[0]["training"]:
            return flat_batch(rows, self.recipe.model.attn_implementation)
        return padded_batch(rows, self.tokenizer.pad_token_id)

    def count(self, batch: Batch) -> int:
        """Return N, the number of trained tokens."""
        return int(batch["targets"].numel())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor | dict[str, Any]:
        """Return the negative log-likelihood of each trained token `[N]` float32, times its weight; or all terms."""
        inputs, weights = without_weights(batch)
        outputs = model(**inputs)
        if not self.regularizers:
            nll: Tensor = weigh(outputs["nll"], weights)
            return nll
        return {name: weigh(outputs[OUTPUTS[name]], weights) for name in self.regularizers}

    def eval_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return loss and items of each row, each `[B]` float64. The loss is the weighted log-likelihood."""
        import torch

        inputs, weights = without_weights(batch)
        nll = weigh(model(**inputs)["nll"], weights)
        rows = batch["positions"] // batch["input_ids"].shape[1]
        zeros = torch.zeros(batch["input_ids"].shape[0], dtype=torch.float64, device=nll.device)
        return {
            "loss": zeros.index_add(0, rows, nll.double()),
            "items": zeros.index_add(0, rows, torch.ones_like(nll, dtype=torch.float64)),
        }

    def metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the loss per trained token, and the perplexity exp(loss)."""
        import numpy as np

        loss = float(rows["loss"].sum() / rows["items"].sum())
        with np.errstate(over="ignore"):  # a run that diverges has infinity, without a warning
            return {"loss": loss, "perplexity": float(np.exp(loss))}

    def answer_ends(self) -> list[int]:
        """Return the tokens that end a trained answer: those of the chat template, or the tokenizer's.

        With `chat: never` rows of text end with the tokenizer's token, and rows of messages with the template's.
        """
        from ftcli.data.chat.encode import trained_ends

        of_text = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        of_chats = sorted(trained_ends(self.tokenizer, self.variables)) if self.tokenizer.chat_template else []
        if self.options.chat == "never":
            return list(dict.fromkeys([*of_text, *of_chats]))  # the first pads answers if the model has no other token
        return of_chats if self.tokenizer.chat_template else of_text

    def save_processor(self, folder: str) -> None:
        """Write the tokenizer with its chat template."""
        from ftcli.data.tokenizer_files import save_tokenizer

        save_tokenizer(self.tokenizer, folder)

    def encode_prompt(
        self,
        prompt: str | list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Return the tokens of a prompt, rendered like training rows.

        Args:
            prompt: Messages, or a text. A text becomes a user turn if the task renders prompts as chats.
            tools: Tools for the chat template.
            chat_template_kwargs: Variables of the chat template; they override those of the recipe.
        """
        from ftcli.data.chat.prompt import encode_prompt

        return encode_prompt(
            self.tokenizer,
            prompt,
            as_chat=self.options.chat == "auto",
            tools=tools,
            chat_template_kwargs={**self.variables, **(chat_template_kwargs or {})},
        )

    def probe(self, batch: Batch) -> Batch:
        """Return the arguments with which the plain model computes logits."""
        return {name: batch[name] for name in ("input_ids", "attention_mask")}
