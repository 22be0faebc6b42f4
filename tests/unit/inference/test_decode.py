"""The loop that chooses tokens, against transformers' own and by hand."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from ftcli.inference.answers import Prompt
from ftcli.inference.decode import (
    PADDING_ROW,
    SamplingOptions,
    decode,
    end_tokens,
    forward_names,
    leaves_out_padding,
    pad_left,
    sample_tokens,
)
from ftcli.inference.generator import TextGenerator
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


def answers(model: Any, prompts: list[list[int]], choice: SamplingOptions, **more: Any) -> list[list[int]]:
    results: list[list[int]] = [[] for _ in prompts]
    options = {"ends": {1}, "pad": 1, "device": torch.device("cpu")} | more
    for tokens in decode(model, forward_names(model), prompts, choice, **options):
        for row, token in zip(results, tokens, strict=True):
            row.extend([] if token is None else [token])
    return results


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Bloom", "Mistral"])
def test_decode_greedily_equals_transformers_alone_and_in_a_batch(kind: str) -> None:
    model = tiny(kind, **({"sliding_window": 4} if kind == "Mistral" else {}))
    expected = []
    for prompt in PROMPTS:
        prompt_ids = torch.tensor([prompt])
        out = model.generate(prompt_ids, attention_mask=torch.ones_like(prompt_ids), max_new_tokens=9, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    assert len({tuple(row) for row in expected}) > 1
    assert answers(model, PROMPTS, SamplingOptions(9)) == expected
    assert [answers(model, [prompt], SamplingOptions(9))[0] for prompt in PROMPTS] == expected


def test_decode_without_a_key_value_cache_gives_the_same_answers() -> None:
    model = tiny("Mamba")
    prompt_ids = torch.tensor([PROMPTS[0]])
    out = model.generate(prompt_ids, attention_mask=torch.ones_like(prompt_ids), max_new_tokens=6, do_sample=False)
    assert answers(model, [PROMPTS[0]], SamplingOptions(6)) == [out[0, 3:].tolist()]


def test_decode_after_an_end_token_continues_the_other_rows() -> None:
    model = tiny("Llama")
    whole = answers(model, PROMPTS, SamplingOptions(9), ends=set())
    end = whole[1][2]
    cut = answers(model, PROMPTS, SamplingOptions(9), ends={end})
    for before, after in zip(whole, cut, strict=True):
        assert after == (before[: before.index(end) + 1] if end in before else before)
    assert len(cut[1]) < 9 and max(len(row) for row in cut) == 9


def test_draws_depend_on_seed_and_number_and_not_on_the_batch() -> None:
    model = tiny("Llama")
    choice = SamplingOptions(9, temperature=1.5, seed=3)
    together = answers(model, PROMPTS, choice)
    apart = [answers(model, [prompt], choice, numbers=[i])[0] for i, prompt in enumerate(PROMPTS)]
    assert together == apart
    assert answers(model, PROMPTS, SamplingOptions(9, temperature=1.5, seed=4)) != together
    assert answers(model, [PROMPTS[0]] * 2, choice)[0] != answers(model, [PROMPTS[0]] * 2, choice)[1]
    state = torch.get_rng_state()
    answers(model, PROMPTS, choice)
    assert torch.equal(torch.get_rng_state(), state)


def test_decode_runs_the_same_number_of_forward_passes_on_every_process() -> None:
    model, calls = tiny("Llama"), []
    model.register_forward_hook(lambda *_: calls.append(1))
    answers_asked: list[bool] = []

    def others_need_five(here: bool) -> bool:
        answers_asked.append(here)
        return len(answers_asked) <= 5

    tokens = answers(model, [[5]], SamplingOptions(9), numbers=[PADDING_ROW], should_continue=others_need_five)
    assert tokens == [[]] and len(calls) == 5 and answers_asked == [False] * 6


def test_decode_nucleus_has_the_fewest_tokens_that_reach_top_p() -> None:
    logits = torch.tensor([[math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]])

    def drawn(**how: float) -> Counter[int]:
        choice = SamplingOptions(1, temperature=1.0, **how)  # type: ignore[arg-type]
        return Counter(sample_tokens(logits, choice, [number], 0)[0] for number in range(2000))

    shares = drawn()
    assert [shares[token] / 2000 for token in range(4)] == pytest.approx([0.1, 0.5, 0.15, 0.25], abs=0.04)
    assert set(drawn(top_p=0.5)) == {1}
    assert set(drawn(top_p=0.51)) == {1, 3}
    assert drawn(top_p=0.75)[1] / 2000 == pytest.approx(2 / 3, abs=0.04)
    assert sample_tokens(logits, SamplingOptions(1), [0], 0) == [1]


def test_decode_pads_rows_on_the_left() -> None:
    ids, mask = pad_left([[7, 8], [9]], 0)
    assert ids.tolist() == [[7, 8], [0, 9]] and mask.tolist() == [[1, 1], [0, 1]]


def test_end_tokens_are_the_tokenizers_and_those_of_the_generation_configuration() -> None:
    model = tiny("Llama")
    model.generation_config.eos_token_id = [7, 9]
    assert end_tokens(tiny_tokenizer(), model) == {1, 7, 9}


def recurrent(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if kind == "Rwkv":
        config = transformers.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
        model = transformers.RwkvForCausalLM(config).eval()
    else:
        sizes = {"hidden_size": 32, "lru_width": 32, "intermediate_size": 48, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_window_size": 6}
        config = transformers.RecurrentGemmaConfig(vocab_size=64, pad_token_id=0, **sizes, **heads)
        model = transformers.RecurrentGemmaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("kind", ["Rwkv", "RecurrentGemma"])
def test_models_that_read_padding_answer_one_prompt_at_a_time(kind: str) -> None:
    model, prompts = recurrent(kind), [[5, 9, 7], list(range(10, 22))]
    choice = SamplingOptions(6)
    assert not leaves_out_padding(model) and leaves_out_padding(tiny("Llama"))
    ids, mask = pad_left(prompts, 0)
    padded = model(input_ids=ids, attention_mask=mask).logits[0, -1]
    assert not torch.allclose(padded, model(input_ids=torch.tensor(prompts[:1])).logits[0, -1], atol=1e-3)
    tokens = {"first": prompts[0], "second": prompts[1]}
    generator = TextGenerator("tiny", tiny_tokenizer(), model, lambda content: tokens[content])
    together, apart = (
        [answer.text for answer in generator.answers([Prompt("first"), Prompt("second")], choice, batch_size=size)]
        for size in (8, 1)
    )
    assert together == apart
