"""Run a conversation with a model in the terminal, or with questions from standard input: `ftcli chat`.

Only answers are written to standard output. The prompt mark and all notes are written to standard error. generator.py
loads the model and generates the answers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.inference.answers import Answer, Prompt
from ftcli.inference.prompts import replace_surrogates
from ftcli.runtime.errors import InputError, nearest
from ftcli.runtime.reader_errors import user_path
from ftcli.runtime.terminal import BOLD, DIM, Style, print_text, printable

if TYPE_CHECKING:
    from ftcli.inference.decode import SamplingOptions
    from ftcli.inference.generator import TextGenerator


PROMPT_MARK = "> "
WITHOUT_WIDTH = re.compile("\x1b[^m]*m")
COMMANDS = {
    "/reset": "remove all turns except the system turn",
    "/system": "TEXT: set the system turn; without TEXT: remove it",
    "/undo": "remove the last question and its answer",
    "/save": "FILE: append the conversation to a .jsonl file, as a training row",
    "/help": "show these commands",
    "/quit": "end the conversation, like Ctrl-D",
}


@dataclass
class Conversation:
    """The turns of a conversation: an optional system turn, then pairs of questions and answers."""

    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    unfinished: list[dict[str, Any]] = field(default_factory=list)  # answers that were stopped

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All turns in order, in the format of chat templates."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return first + self.turns

    def prompt_for(self, question: str) -> Prompt:
        """Return the prompt for a further question, without adding the question."""
        return Prompt([*self.messages, {"role": "user", "content": question}])

    def add(self, question: str, answer: str, *, ended: bool) -> None:
        """Add a question and its answer, and whether the model ended the answer itself."""
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if not ended:
            self.unfinished.append(self.turns[-1])

    def command(self, line: str) -> str:
        """Execute a command other than /quit.

        Returns:
            A line for the user.

        Raises:
            InputError: The command is unknown, or cannot be executed.
        """
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/reset":
            self.turns.clear()
            return "all turns removed"
        if name == "/system":
            self.system = rest or None
            return "system turn set" if rest else "no system turn"
        if name == "/undo":
            del self.turns[-2:]
            left = len(self.turns) // 2
            return f"{left} question{' is' if left == 1 else 's are'} left"
        if name == "/save":
            return self.save(rest)
        if name == "/help":
            return "\n".join(f"{name:<8} {meaning}" for name, meaning in COMMANDS.items())
        raise InputError(f"no command {name}", hint=nearest(name, COMMANDS) or f"known: {', '.join(COMMANDS)}")

    def save(self, path: str) -> str:
        """Append the conversation to a .jsonl file as one row, and return a line for the user."""
        if not self.turns:
            raise InputError("the conversation is empty")
        if not all(turn["content"].strip() for turn in self.turns):
            raise InputError("an answer is empty, and would not be accepted as a training row", hint="/undo removes it")
        if not path.endswith(".jsonl"):
            raise InputError(
                f"/save {path}: the file name must end in .jsonl", hint="each line of the file is one conversation"
            )
        try:
            with user_path(path, "/save").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise InputError(f"/save {path}: {error.strerror}") from error
        cut = any(turn is answer for turn in self.turns for answer in self.unfinished)
        note = "; an answer was stopped, and a model would learn to end there: edit it" if cut else ""
        return f"appended to {path}: {len(self.turns)} turns{note}"


def converse(
    target: str | Path,
    *,
    system: str | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    cpu: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Conversation:
    """Run a conversation until the input ends. Ctrl-C stops an answer; its text so far is kept.

    Args:
        target: A run, a checkpoint, a model folder, or a name on the hub.
        system: System turn before the conversation.
        max_new_tokens: Largest length of an answer, in tokens.
        temperature: 0 for the most likely token, above 0 to sample.
        top_p: Sample from the most likely tokens with this total probability.
        seed: Seed for sampling.
        cpu: Use the CPU, even on a machine with GPUs.
        chat_template_kwargs: Variables of the chat template. They override those of a run's recipe.
        trust_remote_code: Run Python code of the model or the task.

    Returns:
        The conversation.

    Raises:
        InputError: The target cannot be loaded, or has no chat template.
    """
    from ftcli.inference.generate import sampling_options
    from ftcli.inference.generator import load_generator

    choice = sampling_options(max_new_tokens, temperature, top_p, seed)
    writer = load_generator(
        target,
        cpu=cpu,
        chat_template_kwargs=chat_template_kwargs,
        converses=True,
        trust_remote_code=trust_remote_code,
    )
    conversation, is_typed = Conversation(None if system is None else replace_surrogates(system)), sys.stdin.isatty()
    if is_typed:
        _note(f"{target} is ready; /help shows the commands, Ctrl-C stops an answer, Ctrl-D ends the conversation")
    for line in _lines(is_typed):
        if line.startswith("/") and line.split()[0] == "/quit":
            break
        try:
            if line.startswith("/"):  # with a space before it, the line is a question
                _note(conversation.command(line.strip()))
            else:
                _answer(writer, conversation, line.strip(), choice)
        except InputError as error:
            for problem in error.problems:
                _note(str(problem))
    return conversation


def _answer(writer: TextGenerator, conversation: Conversation, question: str, choice: SamplingOptions) -> None:
    """Generate and print an answer piece by piece, and add it to the conversation."""
    import torch

    prompt, gradients = conversation.prompt_for(question), torch.is_grad_enabled()
    last, note = Answer(prompt, "", 0, ended=False), ""
    try:
        fitting = writer.limit_to_positions(prompt, choice)
        for answer in writer.stream_answer(prompt, fitting, number=len(conversation.turns) // 2):
            shown, last = last, answer  # before it is written: an interruption keeps at least what is on the screen
            sys.stdout.write(printable(answer.text[len(shown.text) :], sys.stdout))
            sys.stdout.flush()
        if not last.ended:
            is_full = fitting.max_new_tokens < choice.max_new_tokens
            reason = "the context length of the model: /undo, or /reset" if is_full else "--max-new-tokens"
            note = f"stopped at {last.tokens} tokens ({reason})"
        elif not last.text:
            note = "the answer is empty"
    except KeyboardInterrupt:
        torch.set_grad_enabled(gradients)  # the signal may have interrupted the exit from no_grad
        note = "stopped; the answer so far is kept, /undo removes it"
        if not last.text:
            note, question = "stopped before the first token; the question is removed", ""
    sys.stdout.write("\n")
    sys.stdout.flush()
    if note:
        _note(note)
    if question:
        conversation.add(question, last.text, ended=last.ended)


def _lines(is_typed: bool) -> Iterator[str]:
    """Yield the lines that the user enters, without empty ones."""
    if is_typed:
        import readline  # arrow keys and history

        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one question
    while True:
        try:
            line = _read(is_typed)
        except EOFError:
            break
        except KeyboardInterrupt:
            if not is_typed:
                raise
            print_text(file=sys.stderr)
            continue
        if line.strip():
            yield replace_surrogates(line)
    if is_typed:
        print_text(file=sys.stderr)


def _read(is_typed: bool) -> str:
    """Read one line from the user. Print the prompt mark first if standard input is a terminal."""
    if is_typed and sys.stdout.isatty():
        # readline needs the text before the cursor, with its parts without width marked.
        return input(WITHOUT_WIDTH.sub("\x01\\g<0>\x02", Style.of(sys.stdout).paint(PROMPT_MARK, BOLD)))
    if is_typed:
        sys.stderr.write(PROMPT_MARK)
        sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _note(text: str) -> None:
    """Print a note to standard error."""
    style = Style.of(sys.stderr)
    for line in printable(text, sys.stderr).split("\n"):
        print_text("\n".join(style.paint(part, DIM) for part in style.wrap(line)), file=sys.stderr)
