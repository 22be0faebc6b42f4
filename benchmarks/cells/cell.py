"""Define one cell: shape, length, profile, task and peer. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LANGUAGE = ("sft", "pretrain")
PAIRS = ("preference",)  # a row is a pair of answers to one prompt
CLASSIFIERS = ("text_classification", "image_classification")


@dataclass(frozen=True)
class Cell:
    """One measurement. `length` is the number of tokens of a packed row, `micro_size` the rows of one forward pass.

    A row of a task of PAIRS is a pair, and `length` is the largest number of tokens of an answer with its prompt.
    """

    peer: str
    shape: str
    length: int
    micro_size: int
    task: str = "sft"
    profile: str = "single"
    processes: int = 1
    accumulation: int = 1
    precision: str = "bf16"
    lora: int = 0  # rank of a LoRA adapter on all linear layers; 0: all weights are trained
    four_bit: bool = False  # frozen weights under an adapter in 4 bits (nf4, quantised scales)
    steps: int = 25
    warm: int = 5  # steps before the clock starts
    learning_rate: float = 5e-6  # at a higher rate without warm-up, curves of two kernels diverge on random weights
    settings: list[str] = field(default_factory=list)  # of the peer, as KEY=VALUE
    cpu: bool = False
    traced: int = 0  # steps under the profiler, the last ones
    label: str = ""
    median: int = 0  # tokens of a row in the median; above 0 rows are short and not packed, at most `length` long
    without: str = ""  # an optional patch of other libraries that ftcli leaves out (docs/reference/patches.md)

    @property
    def global_size(self) -> int:
        """Rows of an optimizer step."""
        return self.micro_size * self.accumulation * self.processes

    @property
    def named(self) -> dict[str, str]:
        """The settings as name -> value; raises `ValueError` for one without a value."""
        pairs = [setting.partition("=") for setting in self.settings]
        if wrong := [setting for setting, (_, sign, _) in zip(self.settings, pairs, strict=True) if not sign]:
            raise ValueError(f"--set {wrong[0]}: write KEY=VALUE")
        return {name: value for name, _, value in pairs}

    @property
    def key(self) -> dict[str, Any]:
        """The fields that all lines of one cell share. Curves of lines with the same key must agree."""
        names = ("shape", "length", "micro_size", "task", "profile", "processes", "accumulation", "precision", "lora")
        fields = {name: value for name, value in asdict(self).items() if name in (*names, "learning_rate")}
        if self.median:  # programs divide such rows differently, and the curve does not depend on it
            fields = {name: value for name, value in fields.items() if name not in ("micro_size", "accumulation")}
            fields |= {"median": self.median, "global_size": self.global_size}
        return fields | ({"four_bit": True} if self.four_bit else {})  # older lines do not have this field


@dataclass(frozen=True)
class Inputs:
    """Files that all peers of a cell read: weights, packed rows, ftcli's recipe, and the adapter, if one is trained."""

    model: Path
    rows: Path
    recipe: Path
    adapter: Path


def inputs_of(cell: Cell, work: Path) -> Inputs:
    """Return the paths of the inputs of a cell. The files may not exist yet."""
    rows = f"{cell.task}-{cell.length}-{cell.global_size}x{cell.steps}"
    rows += f"-median{cell.median}" if cell.median else ""
    folder = work / cell.shape
    return Inputs(folder / "model", folder / f"{rows}.npz", folder / f"{rows}.yaml", folder / f"lora-{cell.lora}")


@dataclass
class Measured:
    """The results of one rank."""

    step_seconds: list[float]
    losses: list[float]  # of this rank: their mean over ranks is the loss per item of the global batch
    grad_norms: list[float]
    first_step_seconds: float  # from the start of the measurement: imports, loading, compilation and the step
    peak_allocated: int  # bytes
    peak_reserved: int
    device: str
    details: dict[str, Any] = field(default_factory=dict)  # settings of the peer, log lines of ftcli
    trace: str = ""
