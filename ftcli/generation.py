"""Text from a trained run or from any causal model, on one process, with plain transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import InputError
from .recipe import Model
from .recipe_file import load_recipe
from .run_folder import RunFolder


def generate(
    target: str | Path, prompts: Sequence[str], *, max_new_tokens: int = 128, temperature: float = 0.0
) -> list[str]:
    """Return one answer for each prompt, from a run folder's final weights or from a model's name or folder.

    A prompt is one user's turn when the tokenizer has a chat template, else plain text to go on from. At most
    `max_new_tokens` tokens; temperature 0 takes the likeliest token each time.
    """
    import torch

    from .models import quiet_libraries

    quiet_libraries()
    tokenizer, model = _load(str(target))
    answers = []
    for prompt in prompts:
        ids = _encode(tokenizer, prompt).to(model.device)
        with torch.no_grad():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                **({"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}),
            )
        answers.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip())
    return answers


def _encode(tokenizer: Any, prompt: str) -> Any:
    import torch

    if tokenizer.chat_template is None:
        return torch.tensor([tokenizer(prompt)["input_ids"]])
    turns = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(turns, tokenize=True, add_generation_prompt=True, return_dict=False)
    return torch.tensor([list(ids)])


def _load(target: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    from .artifacts import load_plain
    from .models import load_from_hub, load_tokenizer

    folder = RunFolder(target)
    if (folder.path / "recipe.yaml").exists():
        if not folder.final.is_dir():
            raise InputError(f"{folder.path} has no final weights yet", hint="`ftcli show RUN` tells how far it is")
        if load_recipe(folder.path / "recipe.yaml").task not in ("sft", "pretrain"):
            raise InputError(f"{folder.path} did not train a model that generates text")
        tokenizer, model = (
            load_tokenizer(Model(name=str(folder.final))),
            load_plain("AutoModelForCausalLM", folder.final),
        )
    else:
        section = Model(name=target)
        tokenizer = load_tokenizer(section)
        model = load_from_hub(AutoModelForCausalLM, section, dtype=torch.float32).eval()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return tokenizer, model.to(device)
