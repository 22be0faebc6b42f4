"""Fine-tune models with Hugging Face Accelerate: a recipe defines the training, a profile defines the hardware.

The public names below are imported on first use, so that `import ftcli` imports neither torch nor a GPU library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ftcli._version import __version__ as __version__

if TYPE_CHECKING:
    from ftcli.checkpoint.export import export as export
    from ftcli.config.load import load_recipe as load_recipe
    from ftcli.inference.generate import generate as generate
    from ftcli.launch.launcher import train as train
    from ftcli.launch.submit import submit as submit
    from ftcli.launch.supervisor import LaunchError as LaunchError
    from ftcli.loop import steps as steps
    from ftcli.models.adapters import disable_adapter as disable_adapter
    from ftcli.reports.check import check as check
    from ftcli.reports.doctor import doctor as doctor
    from ftcli.reports.parity import compare_profiles as compare_profiles
    from ftcli.reports.plan import plan as plan
    from ftcli.reports.preview import preview_data as preview_data
    from ftcli.reports.push import push as push
    from ftcli.reports.report import write_report as write_report
    from ftcli.reports.run_comparison import compare_runs as compare_runs
    from ftcli.reports.tracing.trace import trace as trace
    from ftcli.runtime.errors import InputError as InputError
    from ftcli.runtime.run_folder import RunFolder as RunFolder
    from ftcli.training.checkpointing import save_checkpoint as save_checkpoint
    from ftcli.training.evaluation import evaluate as evaluate
    from ftcli.training.own_loop import prepare as prepare


# Public name -> module. A name must not equal that of a submodule: importing the submodule would replace it.
_MODULES = {
    "InputError": "ftcli.runtime.errors",
    "LaunchError": "ftcli.launch.supervisor",
    "RunFolder": "ftcli.runtime.run_folder",
    "check": "ftcli.reports.check",
    "compare_profiles": "ftcli.reports.parity",
    "compare_runs": "ftcli.reports.run_comparison",
    "disable_adapter": "ftcli.models.adapters",
    "doctor": "ftcli.reports.doctor",
    "evaluate": "ftcli.training.evaluation",
    "export": "ftcli.checkpoint.export",
    "generate": "ftcli.inference.generate",
    "load_recipe": "ftcli.config.load",
    "plan": "ftcli.reports.plan",
    "prepare": "ftcli.training.own_loop",
    "preview_data": "ftcli.reports.preview",
    "push": "ftcli.reports.push",
    "save_checkpoint": "ftcli.training.checkpointing",
    "steps": "ftcli.loop",
    "submit": "ftcli.launch.submit",
    "trace": "ftcli.reports.tracing.trace",
    "train": "ftcli.launch.launcher",
    "write_report": "ftcli.reports.report",
}

__all__ = [
    "InputError",
    "LaunchError",
    "RunFolder",
    "check",
    "compare_profiles",
    "compare_runs",
    "disable_adapter",
    "doctor",
    "evaluate",
    "export",
    "generate",
    "load_recipe",
    "plan",
    "prepare",
    "preview_data",
    "push",
    "save_checkpoint",
    "steps",
    "submit",
    "trace",
    "train",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ftcli' has no attribute '{name}'")
    from ftcli.runtime.threads import wait_passively

    wait_passively()  # the module may load torch: the first cell of a notebook can be `ftcli.check`
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
