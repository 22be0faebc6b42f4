"""Answer prompts with a run, a checkpoint or any causal model (`ftcli generate`).

generator.py loads the model; decode.py generates the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ftcli.data.chat.prompt import PromptInput
from ftcli.inference.answers import Answer, Prompt
from ftcli.inference.prompts import collect_prompts
from ftcli.runtime.errors import InputError
from ftcli.runtime.log import log_line
from ftcli.runtime.terminal import printable
from ftcli.runtime.threads import wait_passively

if TYPE_CHECKING:
    from ftcli.inference.decode import SamplingOptions


def generate(
    target: str | Path,
    prompts: Sequence[PromptInput] = (),
    *,
    file: str | Path | None = None,
    system: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 8,
    cpu: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    stream: TextIO | None = None,
) -> list[str]:
    """Answer prompts.

    Args:
        target: A run, one of its checkpoints, or a model's name or folder.
        prompts: Texts or lists of messages. A text is a user turn if the tokenizer has a chat template, and otherwise
            the beginning of a text.
        file: A .txt or .jsonl file with more prompts.
        system: A system turn for every prompt.
        max_new_tokens: Largest number of tokens of an answer.
        temperature: Divisor of the logits; 0 selects the most likely token.
        top_p: Probability of the nucleus from which a token is sampled.
        seed: Seed of the sampling.
        batch_size: Number of prompts that are answered together. It changes answers by rounding only.
        cpu: Whether to use the CPU although there is a GPU.
        chat_template_kwargs: Variables of the chat template; they override those of a run's recipe.
        trust_remote_code: Whether to run code of the task or the model.
        stream: Stream to which the answers are written while they are generated, one prompt at a time.

    Returns:
        One answer per prompt.

    Raises:
        InputError: An argument is invalid, or the target does not generate text.

    Example:
        >>> ftcli.generate("runs/my", ["What is an optimizer step?"], max_new_tokens=64)
    """
    wait_passively(cpu=cpu)  # before torch is loaded
    rows = generate_rows(
        target,
        prompts,
        file=file,
        system=system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        batch_size=batch_size,
        cpu=cpu,
        chat_template_kwargs=chat_template_kwargs,
        trust_remote_code=trust_remote_code,
        stream=stream,
    )
    return [row["answer"] for row in rows]


def generate_rows(
    target: str | Path,
    prompts: Sequence[PromptInput] = (),
    *,
    file: str | Path | None = None,
    system: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 8,
    cpu: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    stream: TextIO | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the answers of `generate` as soon as they are complete. The arguments are those of `generate`.

    Yields:
        `prompt`, `answer`, `tokens` and `ended` (False for an answer that was cut), as JSON values.
    """
    from ftcli.inference.generator import load_generator

    all_prompts = collect_prompts(prompts, file, system)
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}", hint="set it to 1 or more")
    choice = sampling_options(max_new_tokens, temperature, top_p, seed)
    generator = load_generator(
        target, cpu=cpu, chat_template_kwargs=chat_template_kwargs, trust_remote_code=trust_remote_code
    )
    answers = generator.answers(all_prompts, choice, batch_size=batch_size)
    if stream is not None:
        answers = _write_answers(generator, all_prompts, choice, stream)
    cut = 0
    for answer in answers:
        cut += not answer.ended
        yield answer.as_dict()
    if cut:
        which = f"{cut} of {len(all_prompts)} answers were" if len(all_prompts) > 1 else "the answer was"
        log_line(f"{which} cut at {max_new_tokens} tokens (--max-new-tokens)")


def _write_answers(
    generator: Any, prompts: Sequence[Prompt], choice: SamplingOptions, stream: TextIO
) -> Iterator[Answer]:
    """Answer prompts one by one and write each answer to a stream while it is generated."""
    for number, prompt in enumerate(prompts):
        written = ""
        for answer in generator.stream_answer(prompt, choice, number=number):
            stream.write(printable(answer.text[len(written) :], stream))
            stream.flush()
            written = answer.text
        stream.write("\n\n" if number + 1 < len(prompts) else "\n")
        stream.flush()
        yield answer


def sampling_options(max_new_tokens: int, temperature: float, top_p: float, seed: int) -> SamplingOptions:
    """Return the options of sampling.

    Raises:
        InputError: A number is out of range.
    """
    from ftcli.inference.decode import SamplingOptions

    if temperature < 0 or not 0 < top_p <= 1 or max_new_tokens < 1:
        raise InputError(
            f"temperature {temperature:g}, top_p {top_p:g}, max_new_tokens {max_new_tokens}: out of range",
            hint="set temperature to 0 or more, top_p above 0 and at most 1, max_new_tokens to 1 or more",
        )
    return SamplingOptions(max_new_tokens, temperature, top_p, seed)
