"""The loop that chooses tokens, against transformers' own and by hand."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from ftcli.decoding import NOBODY, Choice, choose, decode, end_tokens, forward_names, pad_left
from ftcli.testing import tiny_tokenizer

PROMPTS = [[5, 9, 7], [11], [30, 31, 32, 33, 34, 35, 36, 37]]


def tiny(kind: str, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1} | changes
    if kind == "Mamba":
        config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=4, **sizes)
    elif kind == "GPT2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **sizes)
    elif kind == "Bloom":
        config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **sizes)
    else:
        config = getattr(transformers, f"{kind}Config")(
            hidden_size=32,
            intermediate_size=63,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            **sizes,
        )
    return getattr(
        transformers, f"{kind}{'LMHead' if kind == 'GPT2' else 'ForCausal'}{'Model' if kind == 'GPT2' else 'LM'}"
    )(config).eval()


def answers(model: Any, prompts: list[list[int]], choice: Choice, **more: Any) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    asked = {"ends": {1}, "pad": 1, "device": torch.device("cpu")} | more
    for tokens in decode(model, forward_names(model), prompts, choice, **asked):
        for row, token in zip(found, tokens, strict=True):
            row.extend([] if token is None else [token])
    return found


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Bloom", "Mistral"])
def test_greedy_answers_are_those_of_transformers_alone_and_in_a_batch(kind: str) -> None:
    model = tiny(kind, **({"sliding_window": 4} if kind == "Mistral" else {}))
    wanted = []
    for prompt in PROMPTS:
        asked = torch.tensor([prompt])
        out = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=9, do_sample=False)
        wanted.append(out[0, len(prompt) :].tolist())
    assert len({tuple(row) for row in wanted}) > 1
    assert answers(model, PROMPTS, Choice(9)) == wanted
    assert [answers(model, [prompt], Choice(9))[0] for prompt in PROMPTS] == wanted


def test_a_model_without_a_cache_of_keys_reads_everything_again() -> None:
    model = tiny("Mamba")
    asked = torch.tensor([PROMPTS[0]])
    out = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=6, do_sample=False)
    assert answers(model, [PROMPTS[0]], Choice(6)) == [out[0, 3:].tolist()]


def test_a_row_ends_with_an_end_token_and_the_others_go_on() -> None:
    model = tiny("Llama")
    whole = answers(model, PROMPTS, Choice(9), ends=set())
    end = whole[1][2]
    cut = answers(model, PROMPTS, Choice(9), ends={end})
    for before, after in zip(whole, cut, strict=True):
        assert after == (before[: before.index(end) + 1] if end in before else before)
    assert len(cut[1]) < 9 and max(len(row) for row in cut) == 9


def test_draws_depend_on_seed_and_number_and_not_on_the_batch() -> None:
    model = tiny("Llama")
    choice = Choice(9, temperature=1.5, seed=3)
    together = answers(model, PROMPTS, choice)
    apart = [answers(model, [prompt], choice, numbers=[i])[0] for i, prompt in enumerate(PROMPTS)]
    assert together == apart
    assert answers(model, PROMPTS, Choice(9, temperature=1.5, seed=4)) != together
    assert answers(model, [PROMPTS[0]] * 2, choice)[0] != answers(model, [PROMPTS[0]] * 2, choice)[1]
    state = torch.get_rng_state()
    answers(model, PROMPTS, choice)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_process_runs_as_many_forwards_as_the_one_with_most_to_say() -> None:
    model, calls = tiny("Llama"), []
    model.register_forward_hook(lambda *_: calls.append(1))
    asked: list[bool] = []

    def others_need_five(here: bool) -> bool:
        asked.append(here)
        return len(asked) <= 5

    found = answers(model, [[5]], Choice(9), numbers=[NOBODY], goes_on=others_need_five)
    assert found == [[]] and len(calls) == 5 and asked == [False] * 6


def test_the_nucleus_holds_the_fewest_tokens_that_reach_top_p() -> None:
    logits = torch.tensor([[math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]])

    def drawn(**how: float) -> Counter[int]:
        choice = Choice(1, temperature=1.0, **how)  # type: ignore[arg-type]
        return Counter(choose(logits, choice, [number], 0)[0] for number in range(2000))

    shares = drawn()
    assert [shares[token] / 2000 for token in range(4)] == pytest.approx([0.1, 0.5, 0.15, 0.25], abs=0.04)
    assert set(drawn(top_p=0.5)) == {1}
    assert set(drawn(top_p=0.51)) == {1, 3}
    assert drawn(top_p=0.75)[1] / 2000 == pytest.approx(2 / 3, abs=0.04)
    assert choose(logits, Choice(1), [0], 0) == [1]


def test_rows_are_filled_up_on_the_left() -> None:
    ids, mask = pad_left([[7, 8], [9]], 0)
    assert ids.tolist() == [[7, 8], [0, 9]] and mask.tolist() == [[1, 1], [0, 1]]


def test_end_tokens_are_the_tokenizers_and_those_of_the_generation_configuration() -> None:
    model = tiny("Llama")
    model.generation_config.eos_token_id = [7, 9]
    assert end_tokens(tiny_tokenizer(), model) == {1, 7, 9}
