"""The tables in chat_templates/: conversations, and by hand what a template makes of them, trained text in brackets.

A file is one sentence, then sections that start with `=== `: `tokens` (special ones; with ? an added token that is not
special; bos= and eos=), `template` (Jinja) or `shipped NAME` (a training template of ftcli), and cases. A case has
messages, one JSON object a line, perhaps `options` and `tools`, and either `rendered` or `refused` (the start of the
error). A section ends before the next `===`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ftcli.data.chat.training_templates import training_templates

FOLDER = Path(__file__).parent / "chat_templates"


@dataclass
class Case:
    """One conversation and what comes of it."""

    table: str
    name: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    rendered: str | None = None
    refused: str | None = None


@lru_cache
def read_table(name: str) -> tuple[Any, list[Case]]:
    """Return (tokenizer with the table's template, its cases)."""
    tokens, template, cases = "", "", []
    for section in (FOLDER / f"{name}.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n=== ")[1:]:
        head, _, body = section.partition("\n")
        kind, _, rest = head.partition(" ")
        if kind == "tokens":
            tokens = rest
        elif kind == "template":
            template = body
        elif kind == "shipped":
            template = training_templates()[rest].source
        elif kind == "case":
            cases.append(Case(name, rest, _lines(body)))
        elif kind == "options":
            cases[-1].options, cases[-1].messages = json.loads(rest), _lines(body)
        elif kind == "tools":
            tool, *messages = _lines(body)
            cases[-1].tools, cases[-1].messages = [tool], messages
        elif kind == "rendered":
            cases[-1].rendered = body
        else:
            assert kind == "refused", head
            cases[-1].refused = body.strip()
    return build_tokenizer(tokens, template), cases


def _lines(body: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in body.splitlines() if line]


def build_tokenizer(tokens: str, template: str) -> Any:
    """Return a byte-level BPE tokenizer with some merges, that puts its beginning token before every text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    words = tokens.split()
    named = dict(word.split("=", 1) for word in words if word.startswith(("bos=", "eos=")))
    plain = [word for word in words if not word.startswith(("bos=", "eos="))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["Hello! Hi, good bye.\n\nuser assistant system <|model|>\n"] * 9, trainer)
    tokenizer.add_tokens([AddedToken(word.rstrip("?"), special=not word.endswith("?")) for word in plain])
    if "bos" in named:
        start = (named["bos"], tokenizer.token_to_id(named["bos"]))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{start[0]} $A", special_tokens=[start])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=named["eos"],
        pad_token=named["eos"],
        chat_template=template,
        **({"bos_token": named["bos"]} if "bos" in named else {}),
    )


def brackets(tokenizer: Any, ids: list[int], trained: list[bool]) -> str:
    """Return the text of the ids with every run of trained tokens between ⟦ and ⟧."""
    text, start = "", 0
    for index in range(1, len(ids) + 1):
        if index == len(ids) or trained[index] != trained[start]:
            run = tokenizer.decode(ids[start:index])
            text += f"⟦{run}⟧" if trained[start] else run
            start = index
    return text
