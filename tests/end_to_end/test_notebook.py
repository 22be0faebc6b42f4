"""The notebook as its reader runs it: every cell in order in one kernel, then all of them again."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "prototype_then_scale.ipynb"


def run_all(client: NotebookClient) -> dict[str, str]:
    """Execute every cell in order and return cell id -> what it wrote to standard output."""
    for index, cell in enumerate(client.nb.cells):
        client.execute_cell(cell, index)
    return {
        cell["id"]: "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        for cell in client.nb.cells
        if cell.cell_type == "code"
    }


def drawn(client: NotebookClient) -> list[str]:
    """Return the ids of the cells that show a picture."""
    return [
        cell["id"]
        for cell in client.nb.cells
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", []))
    ]


def started_by(pid: int) -> list[str]:
    """Return what process `pid` started and has not ended: its children, launched ranks too."""
    ranks = [
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("FTCLI_PARENT") == str(pid)
    ]
    return [str(process) for process in [*psutil.Process(pid).children(recursive=True), *ranks]]


def largest_difference(text: str) -> float:
    match = re.search(r"largest difference between the curves: (\S+)", text)
    assert match is not None, text
    return float(match[1])


@pytest.mark.slow
def test_notebook_twice_in_one_kernel_gives_equal_curves_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    client = NotebookClient(nbformat.read(NOTEBOOK, as_version=4), timeout=500)
    with client.setup_kernel(cwd=str(tmp_path)):  # anywhere: nothing is looked for beside the notebook
        first = run_all(client)
        assert first["import"] == "torch is loaded: False\n"
        assert drawn(client) == ["plot-prototype", "plot-both"]
        again = run_all(client)
        for outputs in (first, again):
            assert "done after 30 steps" in outputs["train"]
            assert largest_difference(outputs["plot-both"]) <= 1e-5
        assert first["steps"] == again["steps"]  # a second prepare starts afresh
        assert started_by(client.km.provisioner.pid) == []
    assert list(tmp_path.iterdir()) == []


def test_notebook_is_committed_without_outputs() -> None:
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert cells and all(cell.outputs == [] and cell.execution_count is None for cell in cells)
