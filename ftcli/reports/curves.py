"""Draw the curves of several runs and their differences as one picture.

Matplotlib is optional. It is part of the extra `notebook`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.reports.comparison import relative
from ftcli.runtime.installed import is_installed

if TYPE_CHECKING:
    from ftcli.reports.comparison import Curve, Tolerance


STYLES = ("-", "--", "-.", ":")
MARKS = "osv^Dx+*"
FLOOR = 1e-9  # drawn for identical values, because a logarithmic axis cannot show 0


def draw_curves(curves: Sequence[Curve], tolerance: Tolerance, path: Path) -> str:
    """Draw loss and gradient norm of several runs into a PNG file, with their relative differences below.

    Args:
        curves: The runs. The first is the reference, drawn as a broad grey line.
        tolerance: Tolerances, drawn as horizontal lines.
        path: The file to write.

    Returns:
        The path, or the reason why there is no picture.
    """
    if not is_installed("matplotlib"):
        return "none: matplotlib is not installed (pip install 'ftcli[notebook]')"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, squeeze=False)
    names = (("loss", "loss per item", tolerance.loss), ("grad_norm", "gradient norm", tolerance.grad_norm))
    for column, (name, title, most) in enumerate(names):
        _draw_values(axes[0][column], curves, name, title)
        _draw_differences(axes[1][column], curves, name, most)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    FigureCanvasAgg(figure).print_png(str(path))
    return str(path)


def _draw_values(axis: Any, curves: Sequence[Curve], name: str, title: str) -> None:
    """Draw one quantity of all runs."""
    for index, curve in enumerate(curves):
        steps, values = [row["step"] for row in curve.training], [row[name] for row in curve.training]
        if index == 0:
            axis.plot(steps, values, color="0.75", linewidth=7, label=f"{curve.label} (reference)")
        else:
            axis.plot(steps, values, linewidth=1.2, label=curve.label, **_style(index))
    axis.set_title(title)
    axis.grid(alpha=0.3)


def _draw_differences(axis: Any, curves: Sequence[Curve], name: str, most: float) -> None:
    """Draw the relative differences of one quantity from the reference, and its tolerance."""
    reference = {row["step"]: row for row in curves[0].training}
    for index, curve in enumerate(curves[1:], start=1):
        pairs = [(row, reference[row["step"]]) for row in curve.training if row["step"] in reference]
        differences = [max(relative(a, b, name), FLOOR) for a, b in pairs]
        axis.plot([row["step"] for row, _ in pairs], differences, linewidth=1.2, **_style(index))
    axis.axhline(most, color="black", linewidth=1)
    axis.annotate(
        f"tolerance {most:g}", (0.01, most), xycoords=("axes fraction", "data"), va="bottom", fontsize="small"
    )
    axis.set_yscale("log")
    axis.set_ylim(bottom=FLOOR / 2)
    axis.set_title(f"distance from the reference, relative (at {FLOOR:g}: identical)", fontsize="small")
    axis.set_xlabel("step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)


def _style(index: int) -> dict[str, Any]:
    """Return a line style that differs from the others also without colour."""
    return {
        "linestyle": STYLES[index % len(STYLES)],
        "marker": MARKS[index % len(MARKS)],
        "markersize": 4,
        "color": f"C{index % 10}",
    }
