"""Generate reference/metrics.md: every key of metrics.jsonl and samples.jsonl.

A test in tests/contract trains small runs and fails when a row has a key that is not listed here, or lacks one.
"""

from __future__ import annotations

from typing import Any, get_args

from markup import code, header, table

from ftcli.config.recipe_training import ANSWER_METRICS
from ftcli.config.task_registry import find_task, list_tasks
from ftcli.tasks.shared.label_options import ProblemType

# Keys of every training row. `<item>` is token or sample, `<source>` the label of a data source.
TRAINING = {
    "step": "Number of optimizer steps done.",
    "loss": "Loss per item over the whole global batch, before this step's update.",
    "grad_norm": "Global 2-norm of the gradient before clipping.",
    "learning_rate": "Learning rate of this step.",
    "items": "Items in the global batch: trained tokens, or rows for classification.",
    "samples": "Sum modulo 2^64 of a hash of every row id that was trained in this step, over all processes. "
    "Two runs with equal values trained the same rows.",
    "epoch": "Passes over the training rows so far.",
    "<item>s_per_second": "Items per second since the previous row, over all processes.",
    "rows_per_second": "Rows per second since the previous row, over all processes.",
    "data_wait_share": "Share of the time that process 0, on a GPU its device, waited for its rows.",
    "peak_memory_gb": "Highest memory use of process 0 in this launch, in GB: memory of the GPU, or of the process "
    "on a CPU.",
    "seconds": "Seconds of training in this launch, without evaluations and without waiting for checkpoints.",
}
# Keys of the rows that have the load. `N` is the rank. Only processes with a GPU have the first ones.
GPU_LOAD = {
    "load/gpu_utilisation_percent/rank-N": "Share of the time in which a kernel ran on the GPU of rank N, in percent. "
    "A kernel of NCCL that waits for other ranks counts.",
    "load/gpu_memory_gb/rank-N": "Memory in use on this GPU by all programs, in GB.",
    "load/gpu_power_watts/rank-N": "Power of this GPU.",
    "load/gpu_temperature_celsius/rank-N": "Temperature of this GPU.",
    "load/gpu_throttled_percent/rank-N": "Share of the samples, in percent, in which temperature, hardware or an "
    "external power brake had lowered the clock of this GPU.",
    "load/gpu_power_limited_percent/rank-N": "The same for the power limit, which a GPU at full load often reaches.",
}
HOST_LOAD = {
    "load/cpu_percent/rank-N": "CPU time of the process of rank N, without its loader workers. 100 is one core.",
    "load/process_memory_gb/rank-N": "Host memory (resident set) of this process, in GB.",
    "load/host_memory_available_gb/rank-N": "Memory that is left on the machine of rank N, or in its container, in "
    "GB: the least of MemAvailable and the limits of its cgroups, page cache left out.",
}
SEVERAL_SOURCES = {"train/<source>/loss": "Loss per item of one source. Missing in steps without rows of that source."}
TERMS = {
    "train/<term>": "Mean of one term of the loss over the global batch, before its weight. `loss` is the "
    "weighted sum. Missing in steps where the count of the term is 0."
}
NOTES = {
    "train/<note>": "Mean of one note over the global batch, exact for any micro size and number of processes. "
    "Missing in steps where its count is 0."
}
FP16 = {
    "loss_scale": "Current loss scale.",
    "skipped_steps": "Updates skipped so far because the gradient overflowed.",
}
STREAMING = {
    "rows_read": "Rows read from the stream so far.",
    "cut_rows": "Rows shortened to `data.max_length`.",
    "dropped_rows": "Rows left out because they were too long.",
    "untrained_rows": "Rows left out because they have nothing to train on.",
    "bad_rows": "Rows left out because they are invalid (`data.max_bad_rows`).",
}
EVALUATION = {"step": "Number of optimizer steps done before the evaluation."}
LABELS = {"eval/f1/<label>": "F1 score of one label."}
EVALUATION_SOURCES = {"eval/<source>/loss": "Loss per item of one source, if there are several."}
ANSWERS = {
    "eval/answer_tokens": "Mean length of the generated answers, in tokens.",
    "eval/answers_ended": "Share of the answers that ended with an end token.",
}
TASK_METRICS = {
    "loss": "Loss per item over all evaluation rows. If the loss has several terms, this is the first of them. The "
    "others have their own names.",
    "perplexity": "exp(loss).",
    "accuracy": "Share of rows whose prediction is right; of pairs whose better answer has the higher score.",
    "macro_f1": "F1 score per label, averaged over the labels.",
    "micro_f1": "F1 score of all labels together, for rows with several labels.",
    "subset_accuracy": "Share of rows whose labels are all predicted, and no other label.",
    "mse": "Mean squared error.",
    "mae": "Mean absolute error.",
    "pearson": "Correlation of predictions and targets.",
    "spearman": "Correlation of their ranks.",
    "r2": "1 less the squared errors, divided by the squared deviations of the targets from their mean.",
    "rewards/chosen": "Mean reward of the chosen answers: `beta` times the log-ratio to the reference.",
    "rewards/rejected": "Mean reward of the rejected answers.",
    "rewards/accuracies": "Share of pairs whose chosen answer has the higher reward. Equal rewards count as wrong. "
    "`unpaired_preference` reports it if evaluation rows are pairs.",
    "rewards/margins": "Mean reward of the chosen answers less that of the rejected ones.",
    "margin": "Mean score of better answers less that of worse ones.",
    "mean_reward": "Mean score of all answers.",
    "min_reward": "Lowest score of an answer.",
    "max_reward": "Highest score of an answer.",
    "logps/chosen": "Mean log-probability of the chosen answers.",
    "logps/rejected": "Mean log-probability of the rejected answers.",
    "identity": "Mean of 1 less the cosine of the recogniser's vectors of fused face and source.",
    "reconstruction": "Mean absolute difference of the pixels of fused face and target, for pairs of one person.",
    "perceptual": "Mean squared difference of features of fused face and target, relative to the target's mean square.",
    "attributes": "Half the mean squared difference of the generator's features of fused face and target.",
    "similarity": "Mean cosine of the recogniser's vectors of fused face and source, for pairs of two people.",
    "likeness": "The same of fused face and target.",
    "between": "The same of source and target. A copy of the target has this `similarity`.",
}
SAMPLES = {
    "step": "Number of optimizer steps done.",
    "prompt": "The prompt: a text or a list of messages.",
    "answer": "The generated text.",
    "tokens": "Length of the answer in tokens.",
    "ended": "true if the answer ended with an end token, false if it reached `max_new_tokens`.",
    "reference": "The expected answer, if the prompt file has one.",
}

HEAD = """\
`metrics.jsonl` in the run folder has one JSON object per line. A training row is written every `log.every_steps`
steps. An evaluation row is written after each evaluation. Rows with `loss` are training rows.

```python
import ftcli

rows = ftcli.RunFolder("runs/my").training_rows()
print([row["loss"] for row in rows])
```
"""


LOAD = """\
A thread beside the loop samples the load every 5 seconds, through NVML and the files of the operating system. Training
rows have the mean over the samples since the last row that had the load. Rows in between have none of these keys. With
more than 10 processes the load is recorded less often: at most every half second for each process. Values that the GPU
does not have or that the user may not read are missing. Memory is in GB of 10^9 bytes.
"""


def page() -> str:
    """Return the text of the page."""
    lines = [*header("Metrics", "`docs/generators/metrics_page.py`"), *HEAD.splitlines()]
    lines += ["", "## Training rows", "", *_keys(TRAINING)]
    lines += ["", "`<item>` is `token` or `sample`, depending on the task. Only some runs have these keys:", ""]
    lines += table(
        ("Key", "Only with", "Meaning"),
        [
            *_with("several sources in `data.train`", SEVERAL_SOURCES),
            *_with("a task with several terms", TERMS),
            *_with("a task with notes", NOTES),
            *_with("`precision: fp16`", FP16),
            *_with("`data.streaming`", STREAMING),
        ],
    )
    lines += ["", "## Load of the devices", "", *LOAD.splitlines(), "", *_keys(GPU_LOAD | HOST_LOAD)]
    lines += ["", "## Evaluation rows", "", *table(("Key", "Only with", "Meaning"), _evaluation())]
    lines += [
        "",
        "`checkpoint.keep_best.metric` takes a name without `eval/`. A task of your own adds its own metrics.",
    ]
    lines += ["", "## samples.jsonl", "", "`evaluate.generate` writes one line for each answer.", "", *_keys(SAMPLES)]
    return "\n".join(lines) + "\n"


def task_metrics() -> dict[str, list[str]]:
    """Return metric -> the tasks that report it, of the tasks that come with ftcli."""
    tasks_by_metric: dict[str, list[str]] = {}
    for task in list_tasks():
        kind: Any = find_task(task).Task
        names = list(getattr(kind, "metric_names", ()))
        if hasattr(kind, "metric_names_of"):
            problems = [{"problem_type": problem} for problem in get_args(ProblemType)]
            names += [name for options in problems for name in kind.metric_names_of(options)]
        for name in dict.fromkeys(names):
            tasks_by_metric.setdefault(name, []).append(task)
    return tasks_by_metric


def _evaluation() -> list[tuple[str, str, str]]:
    rows = [(code(name), "", meaning) for name, meaning in EVALUATION.items()]
    for name, tasks in task_metrics().items():
        rows.append((code(f"eval/{name}"), ", ".join(map(code, tasks)), TASK_METRICS[name]))
    rows += _with("`problem_type: multi_label_classification`", LABELS)
    rows += _with("several sources", EVALUATION_SOURCES)
    if {f"eval/{name}" for name in ANSWER_METRICS} != ANSWERS.keys():
        raise ValueError(f"metrics of answers without a description: {ANSWER_METRICS}")
    return rows + _with("`evaluate.generate`", ANSWERS)


def _keys(meanings: dict[str, str]) -> list[str]:
    return table(("Key", "Meaning"), [(code(name), meaning) for name, meaning in meanings.items()])


def _with(condition: str, meanings: dict[str, str]) -> list[tuple[str, str, str]]:
    return [(code(name), condition, meaning) for name, meaning in meanings.items()]
