"""Print the training rows of several run folders side by side, and their distance from the first.

python benchmarks/curves.py RUN RUN ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from ftcli.run_folder import RunFolder


def main(paths: list[str]) -> None:
    """Print one line a step, then the largest relative distances from the first run."""
    runs = {Path(path).name: RunFolder(path) for path in paths}
    rows = {name: run.training_rows() for name, run in runs.items()}
    first = next(iter(rows.values()))
    print("| step |", " | ".join(rows), "|")
    print("|---|" + "---|" * len(rows))
    for index, row in enumerate(first):
        print(f"| {row['step']} |", " | ".join(f"{r[index]['loss']:.5f}" for r in rows.values()), "|")
    for name, found in rows.items():
        pairs = list(zip(found, first, strict=True))
        loss = max(abs(a["loss"] / b["loss"] - 1) for a, b in pairs)
        norm = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs)
        same = all(a["samples"] == b["samples"] and a["learning_rate"] == b["learning_rate"] for a, b in pairs)
        evals = [f"{r['eval/loss']:.6f}" for r in runs[name].metrics() if "eval/loss" in r]
        speed, memory = found[-1]["tokens_per_second"], found[-1]["peak_memory_gb"]
        print(
            f"{name}: loss within {loss:.1e}, grad_norm within {norm:.1e}, rows and rates equal: {same}, "
            f"evaluations {evals}, {speed:.0f} trained tokens/s, peak {memory:.1f} GB"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
