r"""Write the speed tables and plots from the lines that cell.py wrote.

    python benchmarks/cell_tables.py benchmarks/speed.jsonl [MORE ...] [--readme benchmarks/README.md] \
        [--tables benchmarks/tables.md] [--plots FOLDER]

Prints Markdown: the goals with their results, a table for each cell, the ladder, and the patches. The ladder has lines
of ftcli with the label `ladder`, which differ in one setting. Patches are lines with the label `patches`: each leaves
out one optional patch of other libraries, and is compared with the line that has all of them. `--tables` writes this
text between the two marks of a file. `--readme` writes the summary: a line of ftcli for each cell and kind of GPU, and
the goals. A ratio needs two lines of one run on one kind of GPU. `--plots` (needs matplotlib: pip install
'ftcli[notebook]') draws each cell: speeds as bars, and the losses of all peers in one plot.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import textwrap
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cells.cell import CLASSIFIERS  # noqa: E402
from cells.curves import REFERENCES, apart, gpu_of, judged, read, within  # noqa: E402
from cells.goals import COMPARED, EXTRAS, PLAIN, RUN, SPEED, judge, nearest  # noqa: E402

BEGIN, END = "<!-- speed tables: begin -->", "<!-- speed tables: end -->"
LONG = 200  # steps of a long run
SHORTEST = 1024  # tokens of the shortest rows of a language model in the first table
PATCHES = "patches"  # label of lines that leave out a patch, and of lines that are measured for comparison with them
LADDERS = {"ladder": PLAIN, "ladder, extras": EXTRAS}  # label of lines that differ in one setting -> their base line
SPEEDS = ["tokens/s a GPU", "trained", "rows/s a GPU", "of the reference", "MFU"]
HEAD = ["", "GPU", "flash-attn 4", *SPEEDS, "step p50 (p95), ms", "GiB", "first step, s", "curve"]


def cells_of(lines: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the newest line of each peer, label, settings and kind of GPU, by cell, in the order of their first lines.

    Titles do not contain the learning rate. If cells differ only in the learning rate, the newest cell is returned.
    Long runs are a cell of their own. Lines that are traced, or from which a patch is left out, are in no cell.
    """
    lines = [line for line in lines if not line["traced"] and not line.get("without")]
    cells: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for line in lines:
        cells.setdefault(key_of(line), {})[name_of(line), line["device"]] = line
    shown = {title_of(line): key_of(line) for line in lines}
    return [list(named.values()) for key, named in cells.items() if key in shown.values()]


def key_of(line: dict[str, Any]) -> str:
    """Return the cell of a line as text."""
    return json.dumps([line["cell"], is_long(line)])


def is_long(line: dict[str, Any]) -> bool:
    """Return whether a line has many more steps than others of its cell, so that its curve is another one."""
    return bool(line["steps"] >= LONG)


def without_ladder(cell: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of a cell without those of a ladder."""
    return [line for line in cell if line["label"] not in LADDERS]


def patches(lines: list[dict[str, Any]]) -> list[str]:
    """Return what each optional patch is worth: time and memory of a step without it, relative to a step with it."""
    rows = [["patch left out", "cell", "step p50, ms", "with it", "GiB", "with it", "losses"], ["---"] * 7]
    for line in lines:
        same = [other for other in lines if is_base(other, line)]
        if not line.get("without") or not same:
            continue
        base = min(same, key=lambda other: (other["label"] != line["label"], abs(other["time"] - line["time"])))
        difference = max(abs(a / b - 1) for a, b in zip(line["losses"], base["losses"], strict=False))
        settings = "".join(f", `{setting}`" for setting in line["settings"])
        times = [f"{1000 * other['step p50']:.1f}" for other in (line, base)]
        memory = [f"{other['peak allocated GiB']:.1f}" for other in (line, base)]
        named = [f"`{line['without']}`", title_of(line) + settings]
        rows.append([*named, *times, *memory, f"{difference:.0e}"])
    return ["**Each optional patch left out** (docs/reference/patches.md)", "", *markdown(rows), ""] if rows[2:] else []


def is_base(other: dict[str, Any], line: dict[str, Any]) -> bool:
    """Return whether `other` has all patches, and is the same cell as `line` in the same run otherwise.

    Labels may differ: a run measures some cells with all patches for another comparison.
    """
    fields = ("cell", "peer", "settings", "steps", "traced", "device", "versions")
    counts = not other.get("without") and "spoiled" not in other
    return counts and abs(other["time"] - line["time"]) < RUN and all(other[name] == line[name] for name in fields)


def name_of(line: dict[str, Any]) -> str:
    """Return the peer with its label and settings. Settings that the label implies are left out."""
    is_implied = line["peer"] == "bare" or line["label"] in ("no extras", "extras", "fp8")
    implied = ("attn_implementation", "torch_compile=true", "precision=fp8") if is_implied else ()
    parts = [line["label"], *(setting for setting in line["settings"] if not any(name in setting for name in implied))]
    variant = ", ".join(part for part in parts if part)
    return f"{line['peer']} ({variant})" if variant else str(line["peer"])


def has_flash(line: dict[str, Any]) -> str:
    """Return "yes" if attention was computed by flash-attn 4, by the settings and the log of the line."""
    return "yes" if "flash_attention_4" in json.dumps([line["settings"], line.get("details")]) else "no"


def label_of(line: dict[str, Any]) -> str:
    """Return the name of a line for a plot, on several lines if it is long."""
    return textwrap.fill(f"{name_of(line)}, {gpu_of(line)}", 32, break_long_words=False)


def title_of(line: dict[str, Any]) -> str:
    """Return the name of a cell."""
    subject = f"{line['shape']} x{line['length']}, {line['task']}"
    lora = f", LoRA r{line['lora']}" if line["lora"] else ""
    lora += " on 4 bits" if line.get("four_bit") else ""
    steps = f", {line['steps']} steps" if is_long(line) else ""
    rows = f"micro size {line['micro_size']}" + (f" x {line['accumulation']}" if line["accumulation"] > 1 else "")
    return f"{subject}{lora}, {line['precision']}, {line['profile']} x{line['processes']}, {rows}{steps}"


def counted(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines with which others may be compared: untraced, with all patches, and not spoiled."""
    return [line for line in lines if not line["traced"] and not line.get("without") and "spoiled" not in line]


def reference_of(line: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the line of the cell's reference in the same run and on the same kind of GPU; None without one.

    A reference without settings is preferred.
    """
    same = [other for other in counted(lines) if other["peer"] in REFERENCES and key_of(other) == key_of(line)]
    return nearest(line, [other for other in same if not other["settings"]]) or nearest(line, same)


def curve_of(line: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    """Return how far losses and gradient norms are from those of the reference.

    Where no reference has the same number of steps, the nearest line of another program in the same run is used.
    """
    other, differences, name = None, line.get("apart"), ""
    if differences is None and line["peer"] in REFERENCES:
        return "reference"
    if differences is None and line["peer"] in COMPARED:
        same = [one for one in counted(lines) if one["peer"] in COMPARED and one["peer"] != line["peer"]]
        other = nearest(line, [one for one in same if (one["cell"], one["steps"]) == (line["cell"], line["steps"])])
    if other is not None:
        differences, name = apart(line, other), f" from {other['peer']}"
    if differences is None:
        return "-"
    verdict = "" if within(differences) else " **differs**"
    return f"{differences['losses']:.0e}, {differences['grad norms']:.0e}{name}{verdict}"


def table(cell: list[dict[str, Any]], lines: list[dict[str, Any]]) -> list[str]:
    """Return the table of a cell, fastest line first. A dash marks a missing value, or a ratio that does not count.

    Ratios are to the reference among all `lines` that was measured in the same run.
    """
    rows = [HEAD, ["---"] * len(HEAD)]
    for line in sorted(without_ladder(cell), key=lambda line: -line[SPEED]):
        reference = reference_of(line, lines)
        counts = (line is reference or line.get("agrees", False)) and "spoiled" not in line
        spoiled = f"; **spoiled**: {line['spoiled']}" if "spoiled" in line else ""
        rows.append(
            [
                name_of(line),
                gpu_of(line),
                has_flash(line),
                f"{line[SPEED]:,.0f}",
                f"{line['trained tokens a second a GPU']:,.0f}",
                f"{line['rows a second a GPU']:,.1f}",
                f"{line[SPEED] / reference[SPEED]:.3f}" if counts and reference is not None else "-",
                share_of_peak(line),
                f"{1000 * line['step p50']:.1f} ({1000 * line['step p95']:.1f})",
                f"{line['peak allocated GiB']:.1f}",
                f"{line['first step']:.0f}",
                curve_of(line, lines) + spoiled,
            ]
        )
    return [f"**{title_of(cell[0])}**", "", *markdown(rows), ""]


def ladder(cells: list[list[dict[str, Any]]], lines: list[dict[str, Any]]) -> list[str]:
    """Return the effect of single settings on speed and memory, relative to the base line of the cell and run."""
    rows = [["cell", "setting", "speed", "GiB", "curve"], ["---"] * 5]
    for line in (line for cell in cells for line in cell if line["label"] in LADDERS):
        side = LADDERS[line["label"]]
        same = [one for one in counted(lines) if (one["peer"], one["label"]) == side and key_of(one) == key_of(line)]
        if (base := nearest(line, same)) is None:
            continue
        difference = max(abs(a / b - 1) for a, b in zip(line["losses"], base["losses"], strict=False))
        speed = f"{100 * (line[SPEED] / base[SPEED] - 1):+.1f} %"
        memory = f"{line['peak allocated GiB'] - base['peak allocated GiB']:+.1f}"
        setting = " ".join(f"`{setting}`" for setting in line["settings"] if setting != "model.torch_compile=true")
        rows.append([f"{title_of(line)}; {base['label']}", setting, speed, memory, f"{difference:.0e}"])
    return (
        [
            "**Each setting alone**, relative to ftcli's line of the same run without or with extras",
            "",
            *markdown(rows),
            "",
        ]
        if rows[2:]
        else []
    )


def goals(lines: list[dict[str, Any]]) -> list[str]:
    """Return a table of the goals with their results."""
    rows = [["ftcli's tokens per second, compared", "ratio", "goal", "result"], ["---"] * 4]
    for goal, ratio, verdict in judge(lines):
        rows.append([goal.what, "-" if ratio is None else f"{ratio:.3f}", f"{goal.least:.2f}", verdict])
    return [*markdown(rows), ""]


def summary(cells: list[list[dict[str, Any]]]) -> list[str]:
    """Return one table with a line of ftcli for each cell and kind of GPU: the fastest of its newest lines.

    Lines that are spoiled, that differ from the reference's curve, or that train in fp8 are left out. So are language
    models with rows so short that the host limits every step.
    """
    head = ["cell", "GPU", "flash-attn 4", "label", "tokens/s per GPU", "MFU", "median step, ms", "GiB"]
    head += ["first step, s", "day"]
    rows = [head, ["---"] * len(head)]
    for cell in filter(is_whole_size, cells):
        ours = [line for line in without_ladder(cell) if line["peer"] == "ftcli" and "spoiled" not in line]
        ours = [line for line in ours if "precision=fp8" not in line["settings"] and line.get("agrees", True)]
        slowest_first = sorted(ours, key=lambda line: float(line[SPEED]))
        fastest = {gpu_of(line): line for line in slowest_first}
        for _, line in sorted(fastest.items(), reverse=True):
            rows.append(
                [
                    title_of(line),
                    gpu_of(line),
                    has_flash(line),
                    line["label"],
                    f"{line[SPEED]:,.0f}",
                    share_of_peak(line),
                    f"{1000 * line['step p50']:.0f}",
                    f"{line['peak allocated GiB']:.1f}",
                    f"{line['first step']:.0f}",
                    datetime.fromtimestamp(line["time"], timezone.utc).date().isoformat(),
                ]
            )
    return [*markdown(rows), ""]


def is_whole_size(cell: list[dict[str, Any]]) -> bool:
    """Return whether a cell is more than a language model with rows so short that the host limits every step."""
    return cell[0]["task"] in CLASSIFIERS or cell[0]["length"] >= SHORTEST


def share_of_peak(line: dict[str, Any]) -> str:
    """Return the model FLOPs utilisation of a line; a dash with an adapter, where it is not defined."""
    return "-" if line["MFU"] is None or line["lora"] else f"{100 * line['MFU']:.1f} %"


def markdown(rows: list[list[str]]) -> list[str]:
    """Return rows as a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in rows]


def versions(lines: list[dict[str, Any]]) -> list[str]:
    """Return the versions of the measured programs, one line for each set of versions."""
    sets = dict.fromkeys(", ".join(f"{name} {version}" for name, version in line["versions"].items()) for line in lines)
    return [f"- {names}" for names in sets]


def draw(cells: list[list[dict[str, Any]]], folder: Path) -> list[str]:
    """Draw every cell into a PNG of `folder`; return Markdown with the images."""
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("--plots needs matplotlib: pip install 'ftcli[notebook]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    for cell in cells:
        ordered = sorted(without_ladder(cell), key=lambda line: line[SPEED])
        figure = Figure(figsize=(12, max(4.5, 0.7 * len(ordered))), layout="constrained")
        bars, curves = figure.subplots(1, 2)
        colors = ["C0" if line["peer"] == "ftcli" else "0.7" for line in ordered]
        drawn = bars.barh([label_of(line) for line in ordered], [line[SPEED] for line in ordered], color=colors)
        bars.bar_label(drawn, fmt="{:,.0f}", padding=3, fontsize="small")
        bars.margins(x=0.15)
        bars.tick_params(axis="y", labelsize="x-small")
        bars.set_title("tokens a second a GPU", fontsize="small")
        for line in without_ladder(cell):
            look = {"linewidth": 6, "color": "0.75"} if line["peer"] in REFERENCES else {"linewidth": 1.2}
            curves.plot(range(1, len(line["losses"]) + 1), line["losses"], label=label_of(line), **look)
        curves.set_title("loss", fontsize="small")
        curves.set_xlabel("step")
        curves.grid(alpha=0.3)
        figure.legend(*curves.get_legend_handles_labels(), fontsize="x-small", loc="outside lower center", ncols=4)
        figure.suptitle(title_of(cell[0]), fontsize="medium")
        path = folder / (re.sub(r"[^a-z0-9.]+", "-", title_of(cell[0]).lower()) + ".png")
        FigureCanvasAgg(figure).print_png(str(path))
        shown.append(f"![{title_of(cell[0])}]({folder.name}/{path.name})")
    return shown


def replace(path: Path, text: str) -> None:
    """Put text between the two marks of a file; raises `SystemExit` if the marks are missing."""
    content = path.read_text()
    if content.count(BEGIN) != 1 or content.count(END) != 1:
        sys.exit(f"{path} lacks the marks {BEGIN} and {END}")
    before, _, rest = content.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    """Read the lines, print the tables, and write files and plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path, nargs="+")
    parser.add_argument("--readme", type=Path)
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--plots", type=Path)
    arguments = parser.parse_args()
    if missing := [str(path) for path in arguments.facts if not path.exists()]:
        parser.error(f"no such file: {', '.join(missing)}")
    every = [line for path in arguments.facts for line in read(path)]
    lines = judged([line for line in every if line["label"] != PATCHES])
    cells = cells_of(lines)
    left_out = patches(every)
    plots = [] if arguments.plots is None else draw(list(filter(is_whole_size, cells)), arguments.plots)
    parts = [*goals(lines), *(row for cell in cells for row in table(cell, lines)), *ladder(cells, lines)]
    parts += [*left_out, *plots, *versions(lines)]
    text = "\n".join(parts)
    print(text)
    if arguments.tables is not None:
        replace(arguments.tables, text)
    if arguments.readme is not None:
        replace(arguments.readme, "\n".join([*summary(cells), *goals(lines)]).rstrip())


if __name__ == "__main__":
    main()
