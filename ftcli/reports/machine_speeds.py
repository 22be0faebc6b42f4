"""Keep, show and draw what `ftcli doctor --bench` measured. Light: never imports torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftcli.runtime.durable_files import make_folder, write_durably
from ftcli.runtime.gpus import measured_speeds_path
from ftcli.runtime.resources import writing_cache

GIGA, TERA = 10**9, 10**12
CHUNK, MOST = 2**26, 2**30  # bytes of a write, and of all
DISK_SECONDS = 1.0


def write_rate(folder: Path) -> float | None:
    """Return the bytes per second that a new file of a folder takes, with fsync; None if it cannot be written.

    Args:
        folder: A folder. If it does not exist, its nearest parent is used.
    """
    place = folder.absolute()
    while not place.is_dir():
        place = place.parent
    path, content = place / f".ftcli-doctor-{os.getpid()}", os.urandom(CHUNK)
    try:
        with path.open("wb") as file:
            written, started = 0, time.perf_counter()
            while written < MOST and time.perf_counter() - started < DISK_SECONDS:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                written += CHUNK
            return written / (time.perf_counter() - started)
    except OSError:
        return None
    finally:
        path.unlink(missing_ok=True)


def keep_speeds(speeds: Mapping[str, Any]) -> Path:
    """Write the rates of this machine where `ftcli plan` reads them, and return the file.

    The keys beside those of `with_measured_speeds` are `disk_bytes_per_second`, `processes` and `machines`. Each of
    `collectives` has collective, bytes, seconds, algorithm_bytes_per_second and bus_bytes_per_second.

    Args:
        speeds: The rates.
    """
    path = measured_speeds_path()
    with writing_cache():
        make_folder(path.parent)
        write_durably(path, json.dumps(speeds, indent=1).encode())
    return path


def speed_lines(speeds: Mapping[str, Any]) -> list[str]:
    """Return the rates as text: one line each, and a table of the collectives.

    Args:
        speeds: The rates.
    """
    text = [f"matrix products, {name:<5} {rate / TERA:10.3f} TFLOP/s" for name, rate in speeds["product_flops"].items()]
    names = {
        "memory_bytes_per_second": "copy in memory",
        "host_to_device_bytes_per_second": "host to device",
        "device_to_host_bytes_per_second": "device to host",
        "disk_bytes_per_second": "disk, with fsync",
    }
    text += [f"{name:<22} {speeds[key] / GIGA:10.2f} GB/s" for key, name in names.items() if speeds.get(key)]
    if rate := speeds.get("host_layers_per_second"):
        text.append(f"{'host, small layers':<22} {rate:10,.0f} a second")
    if lines := speeds.get("collectives"):
        text += ["", f"collectives of {speeds['processes']} processes; bandwidths in GB/s as nccl-tests define them"]
        text.append(f"  {'collective':<16}{'bytes':>15}{'time in us':>15}{'algorithm':>12}{'bus':>12}")
        for line in lines:
            rates = (line["algorithm_bytes_per_second"] / GIGA, line["bus_bytes_per_second"] / GIGA)
            text.append(
                f"  {line['collective']:<16}{line['bytes']:>15,}{1e6 * line['seconds']:>15,.1f}"
                f"{rates[0]:>12.3f}{rates[1]:>12.3f}"
            )
    return text


def draw_speeds(speeds: Mapping[str, Any], path: Path) -> Path | None:
    """Draw the bus bandwidth over the size of the message, one line per collective; None without matplotlib.

    Args:
        speeds: The rates.
        path: A .png file.
    """
    from ftcli.runtime.installed import is_installed

    lines = speeds.get("collectives")
    if not lines or not is_installed("matplotlib"):
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(line["collective"] for line in lines):
        own = [line for line in lines if line["collective"] == name]
        rates = [line["bus_bytes_per_second"] / GIGA for line in own]
        axes.plot([line["bytes"] for line in own], rates, marker="o", markersize=3, label=name.replace("_", "-"))
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth in GB/s")
    axes.set_title(f"collectives of {speeds['processes']} processes")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
