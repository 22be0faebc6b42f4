"""Models that learned their positions refuse longer rows in words, exactly where they would fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.config.recipe import Recipe
from ftcli.loop import steps
from ftcli.models.positions import learned_positions
from ftcli.runtime.errors import InputError
from ftcli.testing import save_tiny_encoder
from ftcli.training.setup import prepare

from ...support.recipes import minimal_values

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
EXTRAS = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 9},
    "codegen": {"num_attention_heads": 4, "n_positions": 9, "n_ctx": 9, "rotary_dim": 2},
    "gptj": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 9, "rotary_dim": 4},
    "openai-gpt": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 9},
    "ctrl": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 9, "dff": 20},
    "mpt": {"d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 9},
    "xglm": {"d_model": 16, "num_layers": 1, "attention_heads": 2, "ffn_dim": 20},
    "opt": {"ffn_dim": 20, "word_embed_proj_dim": 16},
}


@pytest.mark.parametrize("kind", sorted({"bert", "roberta", "distilbert", "llama", *EXTRAS}))
def test_learned_positions_is_the_longest_row_of_a_model(kind: str) -> None:
    from transformers import AutoConfig, AutoModel

    sizes = SIZES | {"max_position_embeddings": 9, "dim": 16, "n_heads": 2, "n_layers": 1} | EXTRAS.get(kind, {})
    model: Any = AutoModel.from_config(AutoConfig.for_model(kind, **sizes, pad_token_id=1, bos_token_id=2))
    most = learned_positions(model)
    if kind in ("llama", "xglm"):  # positions are computed for any length
        assert most is None
        return
    assert most is not None and most <= 9
    model(input_ids=torch.full((1, most), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, most + 1), 5))


def test_prepare_with_rows_beyond_the_positions_names_the_length_that_fits(tmp_path: Path) -> None:
    save_tiny_encoder(tmp_path / "model")
    rows = [{"text": "x" * length, "label": str(length)} for length in (3, 600)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    values: dict[str, Any] = minimal_values(
        "text_classification", model={"name": str(tmp_path / "model")}, data={"train": str(tmp_path / "rows.jsonl")}
    )
    with pytest.raises(InputError, match="the longest row has 600 tokens, and .* has 512 positions") as caught:
        prepare(Recipe.model_validate(values), cpu=True)
    assert caught.value.problems[0].hint == "set data.max_length to 512 at most"
    values["data"]["max_length"] = 512
    prepare(Recipe.model_validate(values), cpu=True)


def save_xlnet(folder: Path) -> Path:
    """Write a tiny XLNet, whose classifier reads the last position, with a tokenizer."""
    from transformers import AutoTokenizer, XLNetConfig, XLNetModel

    save_tiny_encoder(folder)
    sizes = {"vocab_size": 259, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 20, "pad_token_id": 1}
    XLNetModel(XLNetConfig(**sizes)).save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).pad_token_id is not None
    return folder


def test_classifier_that_reads_the_last_position_gets_its_padding_on_the_left(tmp_path: Path) -> None:
    from ftcli.models.kernels.cuda_graphs import use_cuda_graphs

    model, rows = save_xlnet(tmp_path / "xlnet"), tmp_path / "rows.jsonl"
    made = [{"text": "a b c d e f g"[: 2 * n + 1], "text_pair": "x y", "label": n % 2} for n in range(6)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in made))
    values = minimal_values("text_classification", model={"name": str(model), "dropout": 0}, data={"train": str(rows)})
    values |= {"faults": {"missing_gradient": "warn"}, "train": {"max_steps": 1}}
    losses = []
    for size in (1, 6):
        recipe = Recipe.model_validate(values | {"batch": {"global_size": 6, "micro_size": size}})
        run = prepare(recipe, cpu=True)
        assert use_cuda_graphs(run.model, recipe, "cuda", recomputed="none", is_whole=True) == []
        losses += [step.loss for step in steps(run)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    asked = Recipe.model_validate(values | {"model": values["model"] | {"cuda_graphs": True}})
    with pytest.raises(InputError, match="reads the last position"):
        use_cuda_graphs(run.model, asked, "cuda", recomputed="none", is_whole=True)


def test_reward_model_that_reads_the_last_position_is_refused(tmp_path: Path) -> None:
    model, rows = save_xlnet(tmp_path / "xlnet"), tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n' * 6)
    values = minimal_values("reward", model={"name": str(model)}, data={"train": str(rows)})
    with pytest.raises(InputError, match="scores the last position of a row, where answers have padding"):
        prepare(Recipe.model_validate(values), cpu=True)
