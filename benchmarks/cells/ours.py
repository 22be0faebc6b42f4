"""Train the peer `ftcli`: the program on the recipe of the cell, with metrics, heartbeats, stop requests and checks.

The checkpoint and the final weights after the last step are left out. Settings are keys of the recipe.
"""

from __future__ import annotations

import os
import shutil

from .cell import Cell, Inputs, Measured
from .clock import Clock
from .rows import PackedRows


def train(cell: Cell, inputs: Inputs, clock: Clock) -> Measured:
    """Train the cell's steps as `ftcli train` does; raises `RuntimeError` if a step has other rows than the cell."""
    from ftcli.loop import steps
    from ftcli.runtime.failures import record_failure
    from ftcli.runtime.heartbeat import Heartbeat
    from ftcli.runtime.run_folder import RunFolder
    from ftcli.runtime.stop import StopRequest
    from ftcli.training.out_of_memory import explain_out_of_memory
    from ftcli.training.reporter import Reporter
    from ftcli.training.setup import prepare

    digests = PackedRows(inputs.rows, cell.global_size).digests
    # All ranks have one parent. Another program may train the same recipe on other GPUs at the same time.
    folder = RunFolder(inputs.recipe.with_suffix(f".{os.getppid()}.run"))
    with record_failure(folder), Heartbeat(folder) as heartbeat, StopRequest.listening(folder) as stop:
        run = prepare(inputs.recipe, overrides=overrides_of(cell, inputs), output=folder.path, cpu=cell.cpu)
        run.heartbeat, run.stop = heartbeat, stop
        with Reporter(run) as report, run.saving, explain_out_of_memory(run):
            for step in steps(run):
                report.step(step)
                clock.mark(step.loss_tensor, step.norm_tensor)
                if step.samples != digests[step.number - 1]:
                    raise RuntimeError(f"step {step.number} used other rows than those of {inputs.rows}")
        measured = clock.read(
            log_lines=run.log_lines, micro_size=run.plan.micro_size, accumulation=run.plan.accumulation
        )
        is_main = run.hardware.ranks.is_main
        run.hardware.close()
    if is_main:
        shutil.rmtree(folder.path, ignore_errors=True)
    return measured


def overrides_of(cell: Cell, inputs: Inputs) -> list[str]:
    """Return the keys of the recipe in which cells with the same rows differ. They share one recipe file."""
    sizes = [f"adapter.r={cell.lora}", f"adapter.lora_alpha={2 * cell.lora}"]
    adapter = ["adapter.type=lora", *sizes, f"adapter.path={inputs.adapter.resolve()}"]
    ours = {"precision": cell.precision, "batch.micro_size": cell.micro_size}
    return [
        *(f"{key}={value}" for key, value in ours.items() if key not in cell.named),
        f"optimizer.learning_rate={cell.learning_rate}",
        *(adapter if cell.lora else []),
        *(["model.quantization.load_in_4bit=true"] if cell.four_bit else []),
        *cell.settings,
    ]
