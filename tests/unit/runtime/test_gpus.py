"""The table of GPUs: names, rates, and the rates that a machine measured itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftcli.runtime.errors import InputError
from ftcli.runtime.gpus import (
    HOST_RATE,
    LINK_SHARE,
    MEMORY_SHARE,
    PRODUCT_SHARE,
    TABLE,
    find_gpu,
    require_gpu,
    with_measured_speeds,
)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("a100", "A100 80GB"),
        ("L40S", "L40S"),
        ("l4", "L4"),
    ],
)
def test_find_gpu_with_a_drivers_name_returns_the_row(driver: str, name: str) -> None:
    gpu = find_gpu(driver)
    assert gpu is not None and gpu.name == name


@pytest.mark.parametrize(
    "name", ["", "NVIDIA", "Radeon RX 7900", "RTX", "H1000", "RTX 4090 D", "GeForce RTX 4090 Laptop GPU"]
)
def test_find_gpu_of_an_unknown_model_returns_none(name: str) -> None:
    assert find_gpu(name) is None


def test_require_gpu_of_an_unknown_model_names_a_similar_one() -> None:
    with pytest.raises(InputError, match="--gpu: h10 is not in the table of GPUs") as error:
        require_gpu("h10")
    assert "did you mean 'H100'" in str(error.value.problems[0].hint)
    with pytest.raises(InputError) as error:
        require_gpu("something else")
    assert "known: B200, H200" in str(error.value.problems[0].hint)


def test_table_rates_are_shares_of_the_data_sheet() -> None:
    gpu = require_gpu("H200")
    assert gpu.memory == 141 * 2**30
    assert gpu.products["bf16"] == gpu.products["bf16_pure"] == PRODUCT_SHARE * 989e12
    assert gpu.products["fp8"] == PRODUCT_SHARE * 1979e12 and gpu.products["fp32"] == PRODUCT_SHARE * 67e12
    assert (gpu.bandwidth, gpu.link) == (MEMORY_SHARE * 4800e9, LINK_SHARE * 450e9)
    assert "bf16" not in require_gpu("T4").products
    assert len({gpu.name for gpu in TABLE}) == len(TABLE) and all("NVIDIA" in gpu.source for gpu in TABLE)


def test_with_measured_speeds_replaces_the_rates_of_the_same_gpu(tmp_path: Path) -> None:
    gpu, path = require_gpu("H200"), tmp_path / "speeds.json"
    values = {"gpu": "NVIDIA H200", "product_flops": {"bf16": 7e14, "fp32": "fast"}, "link_bytes_per_second": 2e11}
    path.write_text(json.dumps(values | {"memory_bytes_per_second": -1, "host_bytes_per_second": True}))
    measured = with_measured_speeds(gpu, path)
    assert measured.products == gpu.products | {"bf16": 7e14, "bf16_pure": 7e14}
    assert (measured.link, measured.bandwidth, measured.host_link) == (2e11, gpu.bandwidth, gpu.host_link)
    assert "measured on this machine" in measured.source and measured.host == 1.0
    path.write_text(json.dumps({"gpu": "NVIDIA H200", "host_layers_per_second": HOST_RATE / 2}))
    assert with_measured_speeds(gpu, path).host == 0.5
    assert with_measured_speeds(require_gpu("H100"), path) == require_gpu("H100"), "the file is about another GPU"


def _line(collective: str, size: int, bus: Any) -> dict[str, Any]:
    return {"collective": collective, "bytes": size, "bus_bytes_per_second": bus}


COLLECTIVES = [
    _line("all_reduce", 2**30, 4e10),
    _line("all_reduce", 2**10, 1e6),
    _line("all_gather", 2**28, 3e10),  # the slowest one, at its largest size
    _line("all_gather", 2**20, 9e10),
    _line("point_to_point", 2**30, 1e9),  # not in a training step
    _line("reduce_scatter", 2**30, None),
]


@pytest.mark.parametrize(
    ("values", "link"),
    [
        ({"collectives": COLLECTIVES}, 1.5e10),
        ({"collectives": COLLECTIVES, "machines": 1}, 1.5e10),
        ({"collectives": COLLECTIVES, "machines": 2}, None),
        ({"collectives": COLLECTIVES, "link_bytes_per_second": 7e10}, 7e10),
        ({"collectives": ["torn", {}, COLLECTIVES[-1]]}, None),
        ({"collectives": [_line("all_reduce", 2**20, 1e9)]}, None),  # small messages measure the latency
        ({"collectives": 3}, None),
    ],
)
def test_with_measured_speeds_takes_half_of_the_slowest_collective(
    values: dict[str, Any], link: float | None, tmp_path: Path
) -> None:
    gpu, path = require_gpu("H200"), tmp_path / "speeds.json"
    path.write_text(json.dumps({"gpu": "NVIDIA H200", **values}))
    assert with_measured_speeds(gpu, path).link == pytest.approx(link or gpu.link)


@pytest.mark.parametrize("text", [None, "", '{"gpu": "NVIDIA H2', "[]", '{"gpu": "NVIDIA H200", "product_flops": 3}'])
def test_with_measured_speeds_of_an_unusable_file_keeps_the_table(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    if text is not None:
        path.write_text(text)
    assert with_measured_speeds(require_gpu("H200"), path) == require_gpu("H200")
