"""Generate reference/run-folder.md: the files of a run folder, and the keys of its JSON files.

A test in tests/contract trains a small run and fails when it leaves a file or key that is not listed here, or lacks
one.
"""

from __future__ import annotations

from markup import code, header, table

from ftcli.runtime.checkpoint_names import CHECKPOINTS, COMPLETE, STATE
from ftcli.runtime.folder_lock import LOCK
from ftcli.runtime.run_folder import EVENTS, FLIGHT_RECORDER, HEARTBEATS, LOADS, ORIGIN
from ftcli.training.evaluation_drawings import FOLDER as DRAWINGS
from ftcli.training.memory import RESULT_FILE
from ftcli.training.trackers import TRACKERS

# Path below the run folder -> meaning. `N` stands for a number.
ALWAYS = {
    "recipe.yaml": "The recipe with every default written out, `--set` applied, and the commit of every model and data "
    "set on the hub. Later commands and `--resume` read this file.",
    "profile.yaml": "The profile that was used. Only a comment if the run had none.",
    "environment.json": "Versions, git commit, device, number of processes, command line.",
    "metrics.jsonl": "Training and evaluation rows, see [metrics](metrics.md).",
    EVENTS: "Launches with their profile, checkpoints, steps that took far longer than usual, idle or throttled GPUs, "
    "and low host memory. `ftcli report` shows them.",
    "status.json": "State, step and exit code, see below.",
    f"{CHECKPOINTS}/step-NNNNNN/{STATE}": "What resuming needs besides tensors, and the size and sha256 of every file.",
    f"{CHECKPOINTS}/step-NNNNNN/rank-NNNNN-NNNN.safetensors": "Weights, optimizer state and buffers by parameter name. "
    "One or more files per process.",
    f"{CHECKPOINTS}/step-NNNNNN/{COMPLETE}": "Written last. A checkpoint without this file is ignored.",
    "final/": "The trained weights as safetensors, configuration, tokenizer or image processor, and a model card. "
    "Adapter runs have the adapter only.",
    "probe.safetensors": "One batch and its output. `ftcli export` compares the exported model with it. "
    "Missing if the base model is quantized, and for tasks without a probe.",
}
SOMETIMES = {
    f"{DRAWINGS}/step-NNNNNN-NAME": "Images of an evaluation, of tasks that draw them. `ftcli evaluate` writes "
    "`final-NAME`.",
    "samples.jsonl": "`evaluate.generate`: the answers at each evaluation.",
    "ftcli/": "`log.trackers: [tensorboard]`: event files.",
    TRACKERS: "`log.trackers`: the ids of the run in the trackers, and the step after which each attempt continued.",
    "final/trained_on.json": "Adapter runs: what the base model was. Exports of adapters have it too.",
    "not-by-ftcli-...": "Files that ftcli did not write, moved out of a checkpoint or of `final/` that it replaced.",
    "evaluation.json": "`ftcli evaluate`: the metrics.",
    "report.html": "`ftcli report`, or `log.report: true`: curves, events and answers as a page.",
    ORIGIN: "The checkpoint of another run that this run started from.",
    RESULT_FILE: "`batch.micro_size: auto`: the size that was found.",
    "metrics.abandoned.jsonl": "Rows of steps that were trained again after a resume. "
    "`samples.abandoned.jsonl` is the same for samples.",
    "stop": "Create this file to stop the run after the current step. It is deleted when the run starts again.",
    "errors/rank-N.json": "Error of one process, with its stack trace.",
    f"{HEARTBEATS}/rank-N.json": "What each process is doing. Deleted when the run succeeds.",
    f"{LOADS}/rank-N.json": "Newest load of each process but the first. Deleted when the process ends.",
    f"{FLIGHT_RECORDER}N": "PyTorch's record of the last collectives, after a time-out in NCCL.",
    LOCK: "Lock file. It keeps a second process from training into the folder.",
}
STATUS = {
    "state": "`loading`, `running`, `done`, `stopped` or `failed`.",
    "step": "Number of optimizer steps done.",
    "exit_code": "The [exit code](exit-codes.md); 0 while the run is in progress.",
    "error": "Message if the run failed or was stopped, else empty.",
    "time": "When the file was written, in seconds since 1970.",
}
ENVIRONMENT = {
    "command": "The command line.",
    "python": "Python version.",
    "platform": "Operating system.",
    "packages": "Versions of ftcli and of the main libraries.",
    "git_commit": "Commit of the current folder's git repository, with `-dirty` if it has changes; null outside one.",
    "device": "Device of process 0.",
    "processes": "Number of processes.",
    "launched": "`ftcli` if ftcli started the processes, else `directly`.",
    "resolution": "Commits of the models and data sets on the hub.",
    "trained_on": "What the model was before training: name, commit, configuration, digests of weights and tokenizer; "
    "and of the rows. Commands that open the run compare it.",
    "seconds_to_first_step": "Seconds from the start of the launch to the end of its first step.",
    "seconds_of_loading": "Seconds of the parts before the first step: imports, recipe, rows, devices, model, "
    "kernels, optimizer, placing (the model on the devices) and other.",
}

HEAD = """\
A run writes into `runs/<name of the recipe file>`, or into `--output`. Only one process at a time may train into a
folder. `ftcli show RUN` describes a run folder, and `ftcli show RUN/checkpoints/step-000100` a checkpoint.
"""
TAIL = """\
## Checkpoints

The two newest checkpoints are kept (`checkpoint.keep`), and the best one if `checkpoint.keep_best` is set. A
checkpoint is written under a temporary name and renamed when all of its files are on the disk. ftcli deletes only
checkpoints that it wrote; it keeps other files in `checkpoints/`, and `ftcli show` lists them. Files that others put
into a checkpoint or into `final/` are moved to `not-by-ftcli-...` when ftcli removes or replaces the folder.

## After a crash or a power cut

- A checkpoint that has its name is complete. `metrics.jsonl` has all rows up to its step.
- If `status.json` says `done`, `final/` and `probe.safetensors` are complete.
- `status.json` of a run in progress, and the last rows of `metrics.jsonl`, may be missing or cut off after a power
  cut. `ftcli show` names such files. `--resume auto` continues from the newest complete checkpoint.
"""


def page() -> str:
    """Return the text of the page."""
    lines = [*header("Run folder", "`docs/generators/run_folder_page.py`"), *HEAD.splitlines()]
    lines += ["", "## Files of every run", "", *_keys("File", ALWAYS)]
    lines += ["", "## Files of some runs", "", *_keys("File", SOMETIMES)]
    lines += ["", "## status.json", "", *_keys("Key", STATUS)]
    lines += ["", "## environment.json", "", *_keys("Key", ENVIRONMENT)]
    return "\n".join([*lines, "", *TAIL.splitlines()]) + "\n"


def _keys(name: str, meanings: dict[str, str]) -> list[str]:
    return table((name, "Meaning"), [(code(key), meaning) for key, meaning in meanings.items()])
