"""What `ftcli doctor --bench` measured: definitions, the table, the picture, and the file that `ftcli plan` reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftcli.reports.machine_speeds import draw_speeds, keep_speeds, speed_lines, write_rate
from ftcli.runtime.gpus import measured_speeds_path, require_gpu, with_measured_speeds

LINE = {"collective": "all_reduce", "bytes": 1024, "seconds": 1e-4}
LINE |= {"algorithm_bytes_per_second": 1.024e7, "bus_bytes_per_second": 1.536e7}
SPEEDS = {
    "gpu": "NVIDIA H200",
    "product_flops": {"bf16": 7.5e14},
    "memory_bytes_per_second": 4.2e12,
    "host_bytes_per_second": 5e10,
    "host_layers_per_second": 1650.0,
    "disk_bytes_per_second": None,
    "processes": 4,
    "collectives": [LINE, LINE | {"bytes": 4096}],
}


def test_bus_bandwidth_follows_the_definitions_of_nccl_tests() -> None:
    from ftcli.hardware.speed_tests import bus_bandwidth

    expected = {"all_reduce": 1.5, "all_gather": 0.75, "reduce_scatter": 0.75, "all_to_all": 0.75, "broadcast": 1.0}
    for name, factor in expected.items():
        assert bus_bandwidth(name, 8_000, 2.0, 4) == factor * 4_000
    assert bus_bandwidth("point_to_point", 8_000, 2.0, 2) == 4_000


def test_measure_host_counts_layers_whose_gradients_it_computes() -> None:
    import torch

    from ftcli.hardware.speed_tests import measure_host

    assert 1 < measure_host(torch.device("cpu")) < 1e6


def test_keep_speeds_writes_the_file_that_plan_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCLI_CACHE", str(tmp_path / "cache"))
    assert keep_speeds(SPEEDS) == measured_speeds_path()
    gpu = with_measured_speeds(require_gpu("H200"), measured_speeds_path())
    assert gpu.products["bf16"] == 7.5e14 and gpu.bandwidth == 4.2e12 and gpu.host_link == 5e10
    assert gpu.host == 1.2
    assert gpu.link == require_gpu("H200").link, "small messages measure the latency"


def test_speed_lines_show_bandwidths_in_gigabytes() -> None:
    text = "\n".join(speed_lines(SPEEDS))
    assert "matrix products, bf16     750.000 TFLOP/s" in text and "disk" not in text
    assert "host, small layers          1,650 a second" in text
    assert text.splitlines()[-2].split() == ["all_reduce", "1,024", "100.0", "0.010", "0.015"]


def test_draw_speeds_writes_a_picture_only_with_collectives(tmp_path: Path) -> None:
    path = draw_speeds(SPEEDS, tmp_path / "speeds.png")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")
    assert draw_speeds(SPEEDS | {"collectives": []}, tmp_path / "none.png") is None


def test_write_rate_leaves_no_file_and_is_none_where_nothing_can_be_written(tmp_path: Path) -> None:
    rate = write_rate(tmp_path / "not" / "there")
    assert rate is not None and rate > 0 and list(tmp_path.iterdir()) == []
    assert write_rate(Path("/proc")) is None
