"""Find the variables that a chat template reads, such as `enable_thinking`, and whether it writes today's date.

Templates are parsed and rendered in jinja2's sandbox, as in transformers, because they are untrusted code. Light:
imports jinja2 inside functions and never transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ftcli.runtime.errors import InputError, Problem, nearest
from ftcli.runtime.reader_errors import reading
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


KEY = "data.chat_template_kwargs"
FLAG = "--chat-template-kwargs"
DAY = "26 Jul 2024"  # default date of Llama 3's template
WITH_EACH = ("messages", "tools", "add_generation_prompt")  # variables that ftcli sets for each conversation
ARGUMENTS = (  # further arguments of apply_chat_template, which it does not pass to the template
    "conversation",
    "chat_template",
    "continue_final_message",
    "tokenize",
    "sanitize_control_tokens",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)
QUESTION = {"role": "user", "content": "a"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"properties": {}}}}
PROBES: tuple[dict[str, Any], ...] = (  # conversations that together run most of a template
    {"messages": [QUESTION], "tools": None},
    {"messages": [{"role": "system", "content": "s"}, QUESTION, {"role": "assistant", "content": "b"}], "tools": None},
    {"messages": [QUESTION], "tools": [_TOOL]},
)


def parse_variables(texts: Sequence[str]) -> dict[str, Any]:
    """Parse variables of a template from the command line.

    Args:
        texts: Texts of the form KEY=VALUE, with a YAML value, or JSON objects.

    Returns:
        Name -> value.

    Raises:
        InputError: A text has another form, or sets a variable again.
    """
    from ftcli.config.yaml_document import parse_value

    variables: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        is_object = text.lstrip().startswith("{")
        parsed = parse_value(text, FLAG) if is_object else {name.strip(): parse_value(value, FLAG)}
        if not is_object and not (equals and name.strip().isidentifier()):
            hint = f"{FLAG} enable_thinking=false, or a JSON object"
            raise InputError("is not of the form KEY=VALUE", where=f"{FLAG} {text}", hint=hint)
        if twice := variables.keys() & parsed.keys():
            raise InputError(f"sets {min(twice)} again", where=f"{FLAG} {text}", hint="keep one of the two")
        variables |= parsed
    return variables


def texts_of(template: str | Mapping[str, str] | None) -> tuple[str, ...]:
    """Return the texts of a tokenizer's chat templates.

    Args:
        template: `chat_template` of a tokenizer: None, one text, or several texts by name.
    """
    return () if template is None else (template,) if isinstance(template, str) else tuple(template.values())


@lru_cache(maxsize=8)
def variables_of(texts: tuple[str, ...]) -> frozenset[str] | None:
    """Return the names that templates read before they set them.

    Args:
        texts: Texts of the templates.

    Returns:
        The names; None if a text is not Jinja, which rendering reports.
    """
    from jinja2 import TemplateSyntaxError, meta

    env, names = _environment(), set[str]()
    for text in texts:
        try:
            tree = env.parse(text)
        except TemplateSyntaxError:
            return None
        first: dict[str, str] = {}  # jinja2 also reports names that are set in one branch and read in another
        for name, use in _uses(tree):
            first.setdefault(name, use)
        names |= {name for name in meta.find_undeclared_variables(tree) if first.get(name) != "store"}
    return frozenset(names)


def _uses(node: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, load or store) in the order of execution: the value of an assignment before its name."""
    from jinja2 import nodes

    if isinstance(node, nodes.Name):
        yield node.name, node.ctx
    inner = list(node.iter_child_nodes())
    if isinstance(node, nodes.Assign):
        inner.reverse()
    for child in inner:
        yield from _uses(child)


def unread(variables: Mapping[str, Any], texts: tuple[str, ...], key: str = KEY) -> list[Problem]:
    """Return a problem for each variable that templates never read.

    Args:
        variables: Variables with their values.
        texts: Texts of the templates.
        key: Key or option of the variables in messages.
    """
    known = variables_of(texts) if variables else None
    problems = []
    for name in variables:
        if name in WITH_EACH or name in ARGUMENTS:
            hint = "set a template with task_options.chat_template" if name == "chat_template" else "remove it"
            reason = "is set by ftcli for each conversation" if name in WITH_EACH else "is not a template variable"
            problems.append(Problem(f"{key}: {name} {reason}", hint=hint))
        elif not texts:
            problems.append(Problem(f"{key}: {name} needs a chat template, and there is none", hint="remove it"))
        elif known is not None and name not in known:
            names = sorted(other for other in known if other not in WITH_EACH and not other.endswith("_token"))
            hint = nearest(name, names) or (f"it reads {', '.join(names)}" if names else "it reads no variable")
            problems.append(Problem(f"{key}: the chat template never reads {name}", hint=hint))
    return problems


def check_variables(variables: Mapping[str, Any], texts: tuple[str, ...], key: str = KEY) -> None:
    """Raise `InputError` for variables that templates never read. The arguments are those of `unread`."""
    if problems := unread(variables, texts, key):
        raise InputError(problems)


def check_recipe(recipe: Recipe, key: str = KEY) -> None:
    """Check the template variables of a recipe with the files on this machine. Custom tasks are not checked.

    Args:
        recipe: A valid recipe.
        key: Key or option of the variables in messages.

    Raises:
        InputError: The chat template never reads a variable, or `task_options.chat_template` cannot be read.
    """
    from ftcli.config.task_registry import find_task, is_custom_task

    variables = recipe.data.chat_template_kwargs
    if is_custom_task(recipe.task):
        return
    if "messages" not in properties_of(find_task(recipe.task).Task).formats:
        if variables:
            raise InputError(f"{key}: task {recipe.task} uses no chat template", hint="remove the key")
        return
    if (texts := templates_of(recipe)) is not None:
        check_variables(variables, texts, key)


def require_jinja(text: str, path: str) -> None:
    """Raise `InputError` with file and line if the template of `task_options.chat_template` is not Jinja."""
    from jinja2 import TemplateSyntaxError

    try:
        _environment().parse(text)
    except TemplateSyntaxError as error:
        problem = f"task_options.chat_template is not a Jinja template: {error.message}"
        raise InputError(problem, where=f"{path}:{error.lineno}") from None


def templates_of(recipe: Recipe) -> tuple[str, ...] | None:
    """Return the chat templates that render the rows of a recipe.

    Args:
        recipe: A valid recipe.

    Returns:
        Texts of the templates; None if the model is not on this machine.

    Raises:
        InputError: `task_options.chat_template` cannot be read, or is not Jinja.
    """
    from ftcli.data.chat.training_templates import read_template
    from ftcli.data.paths import model_folder

    option = recipe.task_options.get("chat_template")
    if isinstance(option, str):
        text = read_template(option)
        require_jinja(text, option)
        return (text,)
    folder = model_folder(recipe.model.name)
    if folder is None or not (folder / "tokenizer_config.json").is_file():
        return None
    files = [*folder.glob("chat_template.jinja"), *sorted(folder.glob("additional_chat_templates/*.jinja"))]
    if files:
        return tuple(path.read_text(encoding="utf-8", errors="replace") for path in files)
    with reading(folder / "tokenizer_config.json"):
        templates = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
        if isinstance(templates, list):
            templates = {entry["name"]: entry["template"] for entry in templates}
        return texts_of(templates)


def dated(texts: tuple[str, ...], variables: Mapping[str, Any]) -> str | None:
    """Return how to set the date that templates write into a conversation.

    The templates are rendered, because they may read today's date only if no variable sets it.

    Args:
        texts: Texts of the templates.
        variables: Variables of every conversation.

    Returns:
        The hint; None if no template writes today's date.
    """
    calling = [text for text in texts if "strftime_now" in text and _rendered(text, variables)[1]]
    if not calling:
        return None
    names = sorted(variables_of(texts) or (), key=lambda name: ("date" not in name, name))
    for name in names:
        if name in WITH_EACH or name.endswith("_token"):
            continue
        results = [_rendered(text, {**variables, name: DAY}) for text in calling]
        if all(DAY in shown and not formats for shown, formats in results):
            return f'set {KEY}: {{{name}: "{DAY}"}}'
    return "use a copy of the template with a fixed date (task_options.chat_template)"


def date_finding(texts: tuple[str, ...], variables: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a finding if templates write today's date into rows.

    Args:
        texts: Texts of the templates.
        variables: Variables of every conversation.

    Returns:
        (problem, hint); None if no template writes today's date.
    """
    hint = dated(texts, variables)
    problem = "the chat template writes today's date into the rows (strftime_now), so they differ from day to day"
    return None if hint is None else (problem, hint)


def recipe_notes(recipe: Recipe) -> list[str]:
    """Return notes of `ftcli check` about the chat template of a recipe, from the files on this machine.

    Args:
        recipe: A valid recipe.
    """
    from ftcli.config.task_registry import find_task, is_custom_task

    if is_custom_task(recipe.task) or "messages" not in properties_of(find_task(recipe.task).Task).formats:
        return []
    finding = date_finding(templates_of(recipe) or (), recipe.data.chat_template_kwargs)
    return [] if finding is None else ["{}; {}".format(*finding)]


def date_formats(texts: tuple[str, ...], variables: Mapping[str, Any]) -> list[str]:
    """Return the formats in which templates write today's date (`strftime_now`), sorted.

    Args:
        texts: Texts of the templates.
        variables: Variables of every conversation. Most templates do not read today's date if a variable sets it.

    Returns:
        Formats of `strftime`; an empty list if no template writes today's date.
    """
    return sorted({form for text in texts if "strftime_now" in text for form in _rendered(text, variables)[1]})


def _rendered(text: str, variables: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return (renderings of the probe conversations, formats in which the template writes today's date)."""
    from jinja2 import TemplateError

    env, formats = _environment(), list[str]()

    def strftime_now(form: str) -> str:
        formats.append(form)
        return "today"

    env.globals["strftime_now"] = strftime_now
    tokens = {name: f"<{name}>" for name in variables_of((text,)) or () if name.endswith("_token")}
    shown = ""
    for probe in PROBES:
        try:
            shown += env.from_string(text).render({**tokens, **probe, "add_generation_prompt": True, **variables})
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
            continue  # the template rejects this conversation; formats that it used before still count
    return shown, formats


@lru_cache(maxsize=1)
def _tracker() -> type[Any]:
    """Return a jinja2 extension that replaces {% generation %} blocks by their content."""
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _environment() -> Any:
    """Return a jinja2 sandbox like that of transformers (utils/chat_template_utils.py)."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_tracker(), loopcontrols])
    env.filters["tojson"] = tojson
    env.globals |= {"raise_exception": refuse, "strftime_now": lambda form: "today"}
    return env
