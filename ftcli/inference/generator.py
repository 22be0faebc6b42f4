"""Load the causal model of a run, a checkpoint or a name, and answer prompts on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.checkpoint.deletion import explain_deletion
from ftcli.checkpoint.folder import find_damage, is_checkpoint, newest_intact, read_state, stored_recipe
from ftcli.config.load import load_run_recipe
from ftcli.config.recipe import Recipe
from ftcli.config.recipe_model import Model
from ftcli.config.trust import check_stored
from ftcli.data.chat.prompt import PromptInput, encode_prompt
from ftcli.data.chat.template_variables import FLAG, check_recipe, check_variables, texts_of
from ftcli.inference.answers import Answer, Prompt, build_answer, check_prompt_lengths, remaining_positions
from ftcli.models.structure import base_model_of
from ftcli.runtime.checkpoint_names import checkpoints_of
from ftcli.runtime.errors import InputError
from ftcli.runtime.log import log_line
from ftcli.runtime.reader_errors import missing_folder, user_path
from ftcli.runtime.run_folder import RunFolder
from ftcli.tasks.protocol import CAUSAL_LM

if TYPE_CHECKING:
    import torch

    from ftcli.inference.decode import SamplingOptions


REPLACEMENT_CHARACTER = "\ufffd"  # the text of an incomplete character at the end of an answer


@dataclass(frozen=True)
class TextGenerator:
    """A causal model with its tokenizer on one device.

    Attributes:
        name: The run, checkpoint or model, for messages.
        tokenizer: The model's tokenizer.
        model: The model in evaluation mode.
        encode: Returns the tokens of a prompt, given its content and `Prompt.options`.
    """

    name: str
    tokenizer: Any
    model: Any
    encode: Callable[..., list[int]]

    def answers(self, prompts: Sequence[Prompt], choice: SamplingOptions, *, batch_size: int) -> Iterator[Answer]:
        """Answer prompts in batches.

        Args:
            prompts: The prompts.
            choice: How tokens are selected.
            batch_size: Number of prompts that are answered together, if the model can leave out padding.

        Yields:
            One answer per prompt, in order.

        Raises:
            InputError: A prompt is too long for the model.
        """
        from ftcli.inference.decode import leaves_out_padding

        encoded = [self._encode(prompt) for prompt in prompts]
        check_prompt_lengths(self.model.config, encoded, choice.max_new_tokens)
        batch_size = batch_size if leaves_out_padding(self.model) else 1
        for first in range(0, len(prompts), batch_size):
            rows = range(first, min(first + batch_size, len(prompts)))
            generated: list[list[int]] = [[] for _ in rows]
            for tokens in self._decode([encoded[row] for row in rows], choice, numbers=rows):
                for ids, token in zip(generated, tokens, strict=True):
                    ids.extend([] if token is None else [token])
            for number, ids in zip(rows, generated, strict=True):
                yield self._answer(prompts[number], ids)

    def stream_answer(self, prompt: Prompt, choice: SamplingOptions, *, number: int = 0) -> Iterator[Answer]:
        """Yield the unfinished answer after each token, and the answer at the end. Each text extends the previous one.

        Args:
            prompt: The prompt.
            choice: How tokens are selected.
            number: Number of the prompt, for the seed.
        """
        encoded, ids, shown = self._encode(prompt), [], ""
        check_prompt_lengths(self.model.config, [encoded], choice.max_new_tokens)
        for (token,) in self._decode([encoded], choice, numbers=[number]):
            assert token is not None  # generation stops when the only row is finished
            ids.append(token)
            answer = self._answer(prompt, ids)
            if answer.text.startswith(shown) and not answer.text.endswith(REPLACEMENT_CHARACTER):
                shown = answer.text
            yield replace(answer, text=shown)
        yield self._answer(prompt, ids)

    def limit_to_positions(self, prompt: Prompt, choice: SamplingOptions) -> SamplingOptions:
        """Limit the number of new tokens to the positions that the model has after a prompt.

        Raises:
            InputError: No position is left.
        """
        remaining = remaining_positions(self.model.config, self._encode(prompt))
        if remaining is not None and remaining < 1:
            raise InputError(
                "the conversation has more tokens than the model has positions",
                hint="remove turns with /undo or /reset",
            )
        return choice if remaining is None else replace(choice, max_new_tokens=min(choice.max_new_tokens, remaining))

    def _encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt."""
        return self.encode(prompt.content, **prompt.options)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        from ftcli.inference.decode import end_tokens

        return end_tokens(self.tokenizer, base_model_of(self.model))

    def _decode(
        self, prompts: Sequence[list[int]], choice: SamplingOptions, numbers: Sequence[int]
    ) -> Iterator[list[int | None]]:
        """Yield the next token of each prompt; see `decode`."""
        from ftcli.inference.decode import decode, forward_names

        return decode(
            self.model,
            forward_names(self.model),
            prompts,
            choice,
            ends=self.ends,
            pad=self.tokenizer.pad_token_id,
            device=self.model.device,
            numbers=numbers,
        )

    def _answer(self, prompt: Prompt, ids: list[int]) -> Answer:
        """Return the answer of generated tokens."""
        return build_answer(self.tokenizer, prompt, ids, self.ends)


@dataclass(frozen=True)
class _ChatRequest:
    """Requirements on the chat template, which are checked before a model is loaded.

    Attributes:
        variables: Variables of the template.
        is_needed: Whether the tokenizer must have a template.
    """

    variables: dict[str, Any]
    is_needed: bool

    def require_template(self, name: str, tokenizer: Any) -> None:
        """Raise `InputError` if a template is needed and the tokenizer has none."""
        if self.is_needed and not tokenizer.chat_template:
            raise InputError(
                f"{name} has no chat template, so conversations are not possible",
                hint=f"continue a plain text instead: ftcli generate {name} --prompt TEXT",
            )


def load_generator(
    target: str | Path,
    *,
    cpu: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    converses: bool = False,
    trust_remote_code: bool = False,
) -> TextGenerator:
    """Load the model of a run, a checkpoint or a name. One line is logged.

    A run answers with its final weights, or else with its newest intact checkpoint. Prompts are rendered like the
    training rows of its task.

    Args:
        target: A run, one of its checkpoints, or a model's name or folder.
        cpu: Whether to use the CPU although there is a GPU.
        chat_template_kwargs: Variables of the chat template; they override those of a run's recipe.
        converses: Whether prompts are conversations, which need a chat template.
        trust_remote_code: Whether to run code of the task or the model. The stored recipe cannot enable it.

    Raises:
        InputError: The target does not generate text, the template reads no variable of that name, or a chat template
            is needed and missing.
    """
    _check_exists(str(target))
    import torch

    from ftcli.checkpoint.final import load_plain
    from ftcli.hardware.environment import quiet_libraries
    from ftcli.models.adapter_folder import has_adapter_only
    from ftcli.models.hub import checked_base_revision
    from ftcli.models.load import load_answering_model
    from ftcli.models.tokenizer import load_tokenizer

    quiet_libraries()
    if not str(target):
        raise InputError("the name of the run or model is empty", hint="name a run folder, a checkpoint or a model")
    name, path, chat = str(target), Path(target), _ChatRequest(dict(chat_template_kwargs or {}), converses)
    use = torch.accelerator.is_available() and not cpu
    device = torch.accelerator.current_accelerator() if use else torch.device("cpu")
    assert device is not None
    if is_checkpoint(path):
        if problem := find_damage(path):
            raise InputError(problem, hint="`ftcli show RUN` lists the checkpoints of a run")
        return _from_checkpoint(path, device, chat, trusted=trust_remote_code)
    folder = RunFolder(path)
    if (folder.path / "recipe.yaml").exists():
        return _from_run(folder, device, chat, trusted=trust_remote_code)
    section = Model(name=name, trust_remote_code=trust_remote_code)
    try:
        tokenizer = load_tokenizer(section)
    except InputError as error:
        raise _as_of_command(error) from error
    chat.require_template(name, tokenizer)
    check_variables(chat.variables, texts_of(tokenizer.chat_template), FLAG)
    log_line(f"loading {name} on {device}")
    if has_adapter_only(path):  # transformers would not make room for the embeddings of new tokens
        _check_adapter(path)
        revision = checked_base_revision(path)
        model = load_plain(CAUSAL_LM, path, trust_remote_code=trust_remote_code, revision=revision, whole_base=True)
    else:
        try:
            model = load_answering_model(CAUSAL_LM, section)
        except InputError as error:
            raise _as_of_command(error) from error

    def encode(
        prompt: PromptInput, *, chat_template_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> list[int]:
        variables = {**chat.variables, **(chat_template_kwargs or {})}
        return encode_prompt(tokenizer, prompt, chat_template_kwargs=variables, **options)

    return TextGenerator(name, tokenizer, model.to(device), encode)


def _as_of_command(error: InputError) -> InputError:
    """Return an error without the key of the recipe, because the name is not from a recipe."""
    return InputError([replace(problem, what=problem.what.removeprefix("model.name: ")) for problem in error.problems])


def _check_adapter(folder: Path) -> None:
    """Raise `InputError` if an adapter was trained for a task without answers."""
    from ftcli.models.adapter_folder import adapter_settings

    task_type = adapter_settings(folder).get("task_type")
    if task_type not in (None, "CAUSAL_LM"):
        raise InputError(f"the adapter in {folder} does not generate text: its task type is {task_type}")


def _check_exists(name: str) -> None:
    """Raise `InputError` if a name can only be a local folder, and there is none.

    Names on the hub have at most one slash. A name below an existing folder, such as `runs/first`, is a path too.
    """
    path = user_path(name)
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or ("/" in name and path.parent.is_dir())
    if is_path and not path.exists():
        raise missing_folder(path)


def _from_run(folder: RunFolder, device: torch.device, chat: _ChatRequest, *, trusted: bool) -> TextGenerator:
    """Load the final weights of a run, or else its newest intact checkpoint."""
    from ftcli.checkpoint.final import check_base, check_final_files, load_plain

    recipe = _check_generates(load_run_recipe(folder.path, trust_remote_code=True), folder.path, trusted=trusted)
    if not folder.final.is_dir():
        checkpoint, problems = newest_intact(folder.path) if checkpoints_of(folder.path) else (None, [])
        for problem in problems:
            log_line(problem)
        if checkpoint is None:
            raise InputError(
                f"{folder.path} has no final weights yet, and no intact checkpoint",
                hint="`ftcli show RUN` prints the progress of the run",
            )
        log_line(f"{folder.path} has no final weights yet; using {checkpoint}")
        return _from_checkpoint(checkpoint, device, chat, trusted=trusted)
    model_section = Model(name=str(folder.final), trust_remote_code=trusted)
    task = _build_task(recipe.model_copy(update={"model": model_section}), chat, folder.path)
    if newer := folder.checkpoint_after_final():
        log_line(f"the run continued after these final weights: {newer} is newer")
    log_line(f"loading {folder.final} on {device}")
    check_final_files(folder.final, is_adapter=recipe.adapter.type != "none", has_config=True)
    check_base(folder, recipe)
    model = load_plain(
        getattr(task, "auto_class", None) or CAUSAL_LM,
        folder.final,
        trust_remote_code=trusted,
        revision=recipe.model.revision,
    ).to(device)
    return TextGenerator(str(folder.path), task.tokenizer, model, task.encode_prompt)


def _from_checkpoint(path: Path, device: torch.device, chat: _ChatRequest, *, trusted: bool) -> TextGenerator:
    """Build the model of a checkpoint's recipe, and load the stored weights one at a time."""
    from ftcli.checkpoint.assemble import build_matching_model, load_trained_weights
    from ftcli.checkpoint.reader import CheckpointReader

    with explain_deletion(path):
        state = read_state(path)
        recipe = _check_generates(stored_recipe(path), path, trusted=trusted)
        task = _build_task(recipe, chat, path)
        log_line(f"loading {path} on {device}")
        model = build_matching_model(recipe, task, state).float()
        with CheckpointReader(path, list(state["files"])) as stored:
            load_trained_weights(model, stored, state, is_adapter=recipe.adapter.type != "none")
    return TextGenerator(str(path), task.tokenizer, model.to(device), task.encode_prompt)


def _check_generates(recipe: Recipe, source: Path, *, trusted: bool) -> Recipe:
    """Return the stored recipe of a folder with the caller's consent, after a check that its task generates text.

    A task that certainly generates no text is refused before the consent is checked, because consent would not help.

    Raises:
        InputError: The task generates no text, or the recipe names code and `trusted` is false.
    """
    from ftcli.config.task_registry import find_task, lacks_method

    refusal = InputError(f"the model of {source} does not generate text: its task is {recipe.task}")
    if lacks_method(recipe.task, "encode_prompt"):
        raise refusal
    recipe = check_stored(recipe, source, trusted=trusted)
    if not hasattr(find_task(recipe.task).Task, "encode_prompt"):
        raise refusal
    return recipe


def _build_task(recipe: Recipe, chat: _ChatRequest, where: Path) -> Any:
    """Create a recipe's task, with the requested variables of the chat template."""
    from ftcli.tasks.build import build_task

    if chat.variables:
        variables = {**recipe.data.chat_template_kwargs, **chat.variables}
        data = recipe.data.model_copy(update={"chat_template_kwargs": variables})
        recipe = recipe.model_copy(update={"data": data})
        check_recipe(recipe, FLAG)
    task: Any = build_task(recipe)
    chat.require_template(str(where), task.tokenizer)
    return task
