"""Compare the names in the adapter section with the modules and parameters of a model.

peft ignores a name that matches nothing. In models whose experts were separate modules before transformers 5, it reads
`gate_proj` as a parameter of the experts, and then gives a dense layer of that name no adapter. So every name has to
match, and after peft has added the adapter, every named part has to have one. The module imports peft inside functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftcli.models.architectures import EXPERT_MODULES
from ftcli.models.module_names import ends_with, is_in, is_saved
from ftcli.models.structure import base_model_of, full_shape
from ftcli.models.unadaptable import find_unadaptable
from ftcli.runtime.errors import InputError, Problem, nearest, shortened

if TYPE_CHECKING:
    from torch import nn

    from ftcli.config.recipe_model import Adapter


ALL_LINEAR = "all-linear"
LINEAR = ("Linear", "Linear4bit", "Linear8bitLt", "Conv1D", "Float8Linear")
WITH_WEIGHT = (*LINEAR, "Conv1d", "Conv2d", "Conv3d", "Embedding", "MultiheadAttention")  # peft adapts them as a whole
MOST_NAMED = 4


@dataclass(frozen=True)
class Names:
    """Names of the parts of a model before it has an adapter.

    Attributes:
        modules: Name of the class of each module, by the module's name.
        parameters: Names of the matrices that belong to no linear layer, convolution or embedding: those of experts.
        unadaptable: Name -> reason of the modules that cannot have an adapter, see `find_unadaptable`.
    """

    modules: dict[str, str]
    parameters: list[str]
    unadaptable: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> Names:
        """Return the names of a model without adapter."""
        modules = {name: type(module).__name__ for name, module in model.named_modules() if name}
        parameters = [
            name
            for name, parameter in model.named_parameters()
            if len(full_shape(parameter)) in (2, 3) and modules.get(name.rpartition(".")[0]) not in WITH_WEIGHT
        ]
        return cls(modules, parameters, find_unadaptable(model))

    def target_parameters(self, section: Adapter) -> list[str]:
        """Return the names in `target_modules` that mean parameters. A name that matches a module means that module."""
        if isinstance(section.target_modules, str):
            return []
        return [
            name
            for name in section.target_modules
            if not ends_with(name, self.modules) and ends_with(name, self.parameters)
        ]

    def _example(self) -> str:
        """Return the full name of a linear layer, or of another module."""
        return next((name for name, kind in self.modules.items() if kind in LINEAR), [*self.modules, "model"][0])

    def problems(self, section: Adapter, *, renamed: Iterable[str] = ()) -> list[Problem]:
        """Return a problem for each name in the section's lists that matches nothing, with the nearest names.

        Args:
            section: The adapter section of the recipe.
            renamed: Names in `target_modules` that peft reads as those of parameters.
        """
        targets, found = section.target_modules, []
        known: dict[str, Iterable[str]] = {"modules_to_save": self.modules, "exclude_modules": self.modules}
        if isinstance(targets, list):
            known["target_modules"] = [*self.modules, *self.parameters]
        elif targets.lower() != ALL_LINEAR and not any(re.fullmatch(targets, name) for name in self.modules):
            what = f"adapter.target_modules: no module's full name matches {targets}"
            found.append(Problem(what, hint=f"name modules in a list, or match a full name such as {self._example()}"))
        for key, names in known.items():
            for ending in getattr(section, key):
                if not ends_with(ending, names) and not (key == "target_modules" and ending in renamed):
                    what = f"adapter.{key}: no module's name ends with {ending}"
                    found.append(Problem(what, hint=_hint(ending, names)))
        return found

    def without_effect(
        self, section: Adapter, left_out: Iterable[str], *, saved: Iterable[str] = (), renamed: Iterable[str] = ()
    ) -> list[Problem]:
        """Return a problem for each name in `target_modules` of which all modules are left out.

        Args:
            section: The adapter section of the recipe.
            left_out: `exclude_modules` and the names of modules that no row reaches.
            saved: Endings of the names of modules that are trained and saved whole.
            renamed: Names in `target_modules` that peft reads as those of parameters.
        """
        targets = section.target_modules
        every = [*(name for name, kind in self.modules.items() if kind in WITH_WEIGHT), *self.parameters]
        kept = [name for name in every if not is_in(name, left_out)]
        if isinstance(targets, list):
            named = [t for t in targets if ends_with(t, every) and not ends_with(t, kept) and t not in renamed]
        elif targets.lower() != ALL_LINEAR:
            named = [] if any(re.fullmatch(targets, name) for name in kept) else [targets]
        else:
            rest = [name for name in kept if not is_in(name, saved)]
            if any(self.modules.get(name) in LINEAR for name in rest):
                return []
            what = "adapter.target_modules: all-linear finds no linear layer in this model"
            hint = f"list other modules, such as {_listed(_endings(rest))}" if rest else "exclude fewer modules"
            return [Problem(what, hint=hint)]
        hint = "remove the name; the log says which parts the rows do not reach"
        why = "because adapter.exclude_modules names them, or no row of the task reaches them"
        return [Problem(f"adapter.target_modules: all modules of {n} are left out, {why}", hint=hint) for n in named]


def check_unadaptable(names: Names, section: Adapter) -> None:
    """Check that `target_modules` names no module that cannot have an adapter. all-linear leaves such modules out.

    Args:
        names: Names of the model.
        section: The adapter section of the recipe.

    Raises:
        InputError: It names one that neither `exclude_modules` nor `modules_to_save` names.
    """
    others = [*section.exclude_modules, *section.modules_to_save]
    if named := sorted(name for name in names.unadaptable if is_named(section, name) and not is_in(name, others)):
        raise InputError(
            f"adapter.target_modules: {_listed(named)} cannot have an adapter, because {names.unadaptable[named[0]]}",
            hint="remove its name, or add it to adapter.exclude_modules if other modules have the name too, or to "
            "adapter.modules_to_save to train it whole",
        )


def outermost(names: Names, endings: list[str]) -> list[str]:
    """Return the names of `modules_to_save` without those of parts of other modules that it names.

    A part is trained with the module that contains it. peft would wrap it twice, and one of the two copies would have
    no gradient.

    Args:
        names: Names of the model.
        endings: Module-name endings, new heads among them.

    Raises:
        InputError: A name matches such a part and other modules too.
    """
    inside = lambda name, ending: is_saved(name.rpartition(".")[0], [ending])  # noqa: E731
    matches = {e: [n for n in names.modules if is_saved(n, [e]) and not inside(n, e)] for e in endings}
    saved = {name for found in matches.values() for name in found}
    owner = {name: next((s for s in sorted(saved) if name.startswith(f"{s}.")), None) for name in saved}
    kept = [ending for ending, found in matches.items() if not found or not all(owner[name] for name in found)]
    for ending in kept:
        part = next((name for name in matches[ending] if owner[name]), None)
        if part is not None:
            other = next(name for name in matches[ending] if not owner[name])
            raise InputError(
                f"adapter.modules_to_save: {ending} names {part}, which is a part of {owner[part]}, and modules "
                f"outside of it, such as {other}",
                hint="give longer endings for the modules outside, or remove one of the names",
            )
    nested = {
        ending for ending in kept if any(name.endswith(ending) and inside(name, ending) for name in names.modules)
    }
    return [name for ending in kept for name in (matches[ending] if ending in nested else [ending])]


def refused(names: Names, section: Adapter, left_out: list[str], saved: list[str], error: Exception) -> InputError:
    """Return the error for a section that peft refuses.

    Args:
        names: Names of the model.
        section: The adapter section of the recipe.
        left_out: `exclude_modules` and the names of modules that no row reaches.
        saved: Endings of the names of modules that are trained and saved whole.
        error: The exception of peft.
    """
    targets = section.target_modules
    is_renamed = "Cannot convert" in str(error) or "ParamWrapper" in str(error)
    unmatched = names.problems(section, renamed=targets if is_renamed else ())
    if unmatched := unmatched or names.without_effect(section, left_out, saved=saved):
        return InputError(unmatched)
    if "ParamWrapper" in str(error):
        keys = [key for key in ("lora_dropout", "use_dora") if getattr(section, key)]
        return InputError(
            f"adapter.{' and '.join(keys)}: not possible for the parameters of experts, such as "
            f"{_first_expert(names.parameters)}, which adapter.target_modules names",
            hint=f"remove {' and '.join(keys)}, or list modules without experts in adapter.target_modules",
        )
    named = [name for name in names.modules if is_named(section, name)]
    whole = [name for name in named if names.modules[name] not in WITH_WEIGHT]
    if "not supported" in str(error) and whole:
        parts = [part.removeprefix(f"{whole[0]}.") for part in [*names.modules, *names.parameters]]
        inside = [part for part, full in zip(parts, [*names.modules, *names.parameters], strict=True) if part != full]
        return InputError(
            f"adapter.target_modules: {whole[0]} is a {names.modules[whole[0]]}, which cannot have an adapter as a "
            "whole",
            hint=f"name its linear layers or parameters: {_listed(inside)}" if inside else "leave it out",
        )
    if "rainable_token" in str(error) or "TrainableTokens" in str(error):
        return adapted_rows_error()
    return InputError(
        f"adapter.target_modules: {shortened(str(error), 300)}",
        hint="name other modules, or those that cannot have an adapter in adapter.exclude_modules",
    )


def adapted_rows_error() -> InputError:
    """Return the error for an adapter on embeddings or a head whose new rows are trained beside it."""
    return InputError(
        "adapter.target_modules names the embeddings or the head, and model.new_tokens trains the new rows of both",
        hint="remove them from adapter.target_modules, or train them whole: name them in adapter.modules_to_save",
    )


def check_adapted(names: Names, wrapped: Any, section: Adapter, left_out: Iterable[str], excluded: str | None) -> None:
    """Check that every name matches, and that peft has adapted all named parts and no excluded ones.

    Args:
        names: Names of the model before it had an adapter.
        wrapped: The peft model.
        section: The adapter section of the recipe.
        left_out: `exclude_modules` and the names of modules that no row reaches.
        excluded: Regular expression of the names of all modules without an adapter; None for none.

    Raises:
        InputError: A name matches nothing, a named module has no adapter, or an excluded part has one.
    """
    config, targets = wrapped.peft_config["default"], section.target_modules
    by_peft = set(config.target_parameters or ()) - set(names.target_parameters(section))
    renamed = set(targets) - set(config.target_modules or ()) if by_peft and isinstance(targets, list) else set()
    problems = names.problems(section, renamed=renamed)
    if problems := problems or names.without_effect(section, left_out, renamed=renamed):
        raise InputError(problems)
    adapted = _adapted(wrapped)
    wrong = [name for name in adapted if excluded and re.fullmatch(excluded, name)]
    if wrong:
        raise InputError(
            f"adapter.exclude_modules: peft adapts {_listed(wrong)}, although this key or modules_to_save names it",
            hint="list the modules to adapt in adapter.target_modules, without the names of these parameters",
        )
    missing = [
        name
        for name, kind in names.modules.items()
        if kind in WITH_WEIGHT and is_named(section, name) and name not in adapted
        if not (excluded and re.fullmatch(excluded, name))
    ]
    if missing and targets != ALL_LINEAR:
        raise InputError(
            f"adapter.target_modules: peft gives {_listed(missing)} no adapter, because in this model it reads such a "
            "name as that of the experts' parameters",
            hint="add their endings to adapter.exclude_modules if they need no adapter",
        )


def describe_unadapted(model: Any, section: Adapter) -> list[str]:
    """Return a log line if `all-linear` leaves linear layers or parameters of experts without an adapter.

    Args:
        model: The model of a run, not sharded by a wrapper of its own.
        section: The adapter section of the recipe.
    """
    if section.type == "none" or section.target_modules != ALL_LINEAR:
        return []
    inner, adapted = base_model_of(model), _adapted(model)
    modules = {name.replace(".base_layer", ""): type(module).__name__ for name, module in inner.named_modules()}
    experts = [
        plain
        for name, parameter in inner.named_parameters()
        if len(full_shape(parameter)) == 3 and not name.count("lora_")
        if set(EXPERT_MODULES) & set((plain := name.replace(".base_layer", "")).split("."))
    ]
    unadaptable = find_unadaptable(inner)
    others = [name for name in unadaptable if "Conv" not in modules[name]]
    linear = [n for n, kind in modules.items() if (kind in LINEAR or n in others) and re.search(r"\.\d+\.", n)]
    left = [
        name
        for name in [*experts, *(linear if experts else others)]
        if name not in adapted and "lora_" not in name
        if not is_in(name, section.exclude_modules) and not is_saved(name, section.modules_to_save)
    ]
    if not left:
        return []
    of_experts = (
        ". Parameters of experts get one if adapter.target_modules is a list that names them, such as experts.down_proj"
    )
    return [f"adapter: all-linear leaves {_listed(left)} without an adapter{of_experts if experts else ''}"]


def _adapted(wrapped: Any) -> set[str]:
    """Return the names of the modules and parameters with an adapter, as they were before."""
    from peft.tuners.lora import LoraLayer

    adapted = set()
    for name, module in base_model_of(wrapped).named_modules():
        if isinstance(module, LoraLayer):
            own = getattr(module, "parameter_name", None)
            adapted.add(name.replace(".base_layer", "") + (f".{own}" if own else ""))
    return adapted


def is_named(section: Adapter, name: str) -> bool:
    """Return whether `target_modules` matches a full name, by the rules of peft.

    Args:
        section: The adapter section of the recipe.
        name: Full name of a module.
    """
    targets = section.target_modules
    if isinstance(targets, str):
        return targets.lower() != ALL_LINEAR and re.fullmatch(targets, name) is not None
    return any(ends_with(target, [name]) for target in targets)


def _endings(names: Iterable[str]) -> list[str]:
    """Return the distinct last parts of names that are not numbers."""
    return [last for last in dict.fromkeys(name.rpartition(".")[2] for name in names) if not last.isdigit()]


def _first_expert(names: list[str]) -> str:
    """Return the first name of a parameter of experts, or else the first name."""
    return next((name for name in names if set(EXPERT_MODULES) & set(name.split("."))), names[0])


def _hint(name: str, known: Iterable[str]) -> str:
    """Return the nearest of the endings of the known names."""
    parts = name.count(".") + 1
    endings = [".".join(full.split(".")[-parts:]) for full in known]
    endings = [ending for ending in dict.fromkeys(endings) if not ending.isdigit()]
    longer = next((f"did you mean '{ending}'?" for ending in endings if ending.endswith(name)), "")
    return longer or nearest(name, endings) or f"the model has, for instance, {_listed(endings[-MOST_NAMED:])}"


def _listed(names: Iterable[str]) -> str:
    """Return names with commas, at most `MOST_NAMED` of them."""
    every: Sequence[str] = sorted(names)
    more = f" and {len(every) - MOST_NAMED} more" if len(every) > MOST_NAMED else ""
    return f"{', '.join(every[:MOST_NAMED])}{more}"
