"""Facts of a machine: storage, network, variables, versions, NCCL's lines, and machines that differ."""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ftcli.runtime.machine.comparison import clock_fact, comparison_facts
from ftcli.runtime.machine.facts import Fact
from ftcli.runtime.machine.nccl_log import read_transports, transport_facts
from ftcli.runtime.machine.network import chosen_interfaces, gloo_interface_fact, infiniband_facts, nccl_interface_fact
from ftcli.runtime.machine.nvml import read_devices
from ftcli.runtime.machine.software import TorchBuild, bytecode_facts, driver_facts, software_facts, torch_build
from ftcli.runtime.machine.storage import (
    file_system,
    folder_fact,
    has_rdma,
    locked_memory_fact,
    open_files_fact,
    shm_fact,
)
from ftcli.runtime.machine.variables import variable_facts

# Recorded lines, shortened: NVIDIA/nccl issues 952 (sockets), 1189 (InfiniBand), 226 (no device, older form), and
# NVIDIA/nccl-tests issue 166 (shared memory).
SOCKETS = """\
node:919:1150 [0] NCCL INFO Channel 01/0 : 8[0] -> 15[7] via P2P/IPC/read
node:926:1151 [7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3
node:926:1151 [7] NCCL INFO Channel 07/0 : 15[7] -> 6[6] [send] via NET/Socket/3
"""
INFINIBAND = """\
H20-GPU-06:4015539:4015652 [0] NCCL INFO Channel 07/0 : 0[0] -> 2[0] [receive] via NET/IB/3/GDRDMA
H20-GPU-06:4015540:4015653 [1] NCCL INFO Channel 01/0 : 3[1] -> 1[1] [send] via NET/IB/2/GDRDMA
H20-GPU-06:4015540:4015653 [1] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM
"""
OLDER = """\
ip-172-31-12-21:45361:45361 [0] NCCL INFO NET/IB : No device found.
ip-172-31-12-210:45305:45305 [0] NCCL INFO NET/Socket : Using [0]ens3:172.31.12.210<0>
ip-172-31-0-119:45328:45333 [0] NCCL INFO Ring 00 : 35 -> 34 [send] via NET/Socket/0
"""
SHARED_MEMORY = "ubuntu:39964:40050 [6] NCCL INFO Channel 09 : 6[6] -> 7[7] via SHM/direct/direct\n"


def states(facts: list[Fact]) -> dict[str, str]:
    return {fact.topic: fact.state for fact in facts}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_shm_fact_of_a_folder_that_is_missing_is_wrong(tmp_path: Path) -> None:
    assert shm_fact(tmp_path / "shm").state == "wrong"
    assert shm_fact(tmp_path).state in ("ok", "look", "wrong")  # that of the disk


def test_file_system_is_that_of_the_longest_mount_point(tmp_path: Path) -> None:
    table = "22 1 8:1 / / rw shared:1 - ext4 /dev/sda rw\n23 22 0:40 / /data\\040disk rw - nfs4 server:/x rw\nbroken\n"
    write(tmp_path / "proc" / "self" / "mountinfo", table)
    assert file_system(Path("/home"), tmp_path) == "ext4"
    assert file_system(Path("/data disk/runs"), tmp_path) == "nfs4"
    assert file_system(Path("/home"), tmp_path / "other") is None


@pytest.mark.parametrize(("kind", "state"), [("ext4", "ok"), ("tmpfs", "look"), ("overlay", "look"), ("nfs4", "look")])
def test_folder_fact_judges_the_file_system_of_the_nearest_parent(kind: str, state: str, tmp_path: Path) -> None:
    write(tmp_path / "proc" / "self" / "mountinfo", f"22 1 8:1 / / rw - {kind} device rw\n")
    fact = folder_fact("cache", tmp_path / "not" / "there", tmp_path)
    assert kind in fact.text and (fact.state == state or "free space" in fact.remedy)


def test_locked_memory_fact_with_rdma_and_a_limit_is_wrong() -> None:
    assert locked_memory_fact(64 * 1024, rdma=True).state == "wrong"
    assert locked_memory_fact(64 * 1024, rdma=False).state == "ok"
    assert locked_memory_fact(resource.RLIM_INFINITY, rdma=True).state == "ok"


def test_open_files_fact_of_a_low_limit_is_to_be_looked_at() -> None:
    assert open_files_fact(1024).state == "look" and open_files_fact(1024).remedy
    assert open_files_fact(65536).state == open_files_fact(resource.RLIM_INFINITY).state == "ok"


def test_infiniband_facts_tell_missing_devices_and_the_state_of_ports(tmp_path: Path) -> None:
    assert not has_rdma(tmp_path)
    assert [fact.state for fact in infiniband_facts(1, tmp_path)] == ["ok"]
    (none,) = infiniband_facts(2, tmp_path)
    assert none.state == "look" and "no InfiniBand" in none.text and none.remedy
    for device, state, layer in (("mlx5_0", "4: ACTIVE", "InfiniBand"), ("mlx5_1", "1: DOWN", "Ethernet")):
        port = tmp_path / "sys" / "class" / "infiniband" / device / "ports" / "1"
        write(port / "state", f"{state}\n")
        write(port / "rate", "400 Gb/sec (4X NDR)\n")
        write(port / "link_layer", f"{layer}\n")
    assert has_rdma(tmp_path)
    active, down = infiniband_facts(2, tmp_path)
    assert (active.state, active.text) == ("ok", "ACTIVE, 400 Gb/sec (4X NDR), InfiniBand")
    assert down.state == "look" and down.text == "DOWN, 400 Gb/sec (4X NDR), RoCE" and "mlx5_1" in down.remedy
    write(tmp_path / "sys" / "class" / "infiniband" / "mlx5_0" / "ports" / "1" / "state", "1: DOWN\n")
    assert {fact.state for fact in infiniband_facts(2, tmp_path)} == {"wrong"}


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        (None, ["ib0"]),
        ("eth", ["eth0", "eth1"]),
        ("=eth1", ["eth1"]),
        ("^eth,ib", ["lo", "docker0"]),
        ("^=eth0", ["lo", "docker0", "eth1", "ib0"]),
        ("bond", []),
    ],
)
def test_chosen_interfaces_follows_the_rules_of_nccl(setting: str | None, chosen: list[str]) -> None:
    assert chosen_interfaces(setting, ["lo", "docker0", "eth0", "eth1", "ib0"]) == chosen


def test_chosen_interfaces_takes_docker_and_loopback_last() -> None:
    assert chosen_interfaces(None, ["lo", "docker0", "eth0"]) == ["eth0"]
    assert chosen_interfaces(None, ["lo", "docker0"]) == ["docker0"]
    assert chosen_interfaces(None, ["lo"]) == ["lo"] and chosen_interfaces(None, []) == []


def test_interface_facts_of_a_name_that_does_not_exist_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    for fact in (nccl_interface_fact(1), gloo_interface_fact(1)):
        assert fact.state == "wrong" and "nosuch0" in fact.text
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    assert nccl_interface_fact(2).state == "wrong" and nccl_interface_fact(1).state == "ok"


def test_variable_facts_name_the_known_variable_that_a_misspelt_one_means() -> None:
    environ = {"NCCL_SOKET_IFNAME": "eth0", "NCLL_DEBUG": "INFO", "OMP_NUM_THREAD": "1", "NCCL_MY_PLUGIN_COLOUR": "red"}
    facts = {fact.topic: fact for fact in variable_facts(environ | {"PATH": "/bin", "HOME": "/x"}, cores=4, gpus=0)}
    assert facts.keys() == environ.keys()
    hints = {name: fact.remedy for name, fact in facts.items() if fact.state == "wrong"}
    assert hints == {
        "NCCL_SOKET_IFNAME": "did you mean 'NCCL_SOCKET_IFNAME'?",
        "NCLL_DEBUG": "did you mean 'NCCL_DEBUG'?",
        "OMP_NUM_THREAD": "did you mean 'OMP_NUM_THREADS'?",
    }
    assert facts["NCCL_MY_PLUGIN_COLOUR"].state == "look"


@pytest.mark.parametrize(
    ("name", "value", "state"),
    [
        ("CUDA_VISIBLE_DEVICES", "0,1", "ok"),
        ("CUDA_VISIBLE_DEVICES", "0,4", "wrong"),
        ("CUDA_VISIBLE_DEVICES", "1,1", "wrong"),
        ("CUDA_VISIBLE_DEVICES", "-1", "look"),
        ("CUDA_VISIBLE_DEVICES", "GPU-8932f937,MIG-5", "ok"),
        ("CUDA_VISIBLE_DEVICES", "0,cuda:1", "wrong"),
        ("OMP_NUM_THREADS", "8", "ok"),
        ("OMP_NUM_THREADS", "9", "look"),
        ("OMP_NUM_THREADS", "many", "wrong"),
        ("NCCL_DEBUG", "info", "ok"),
        ("NCCL_DEBUG", "INFOO", "wrong"),
        ("NCCL_P2P_DISABLE", "1", "look"),
        ("NCCL_P2P_DISABLE", "0", "ok"),
        ("NCCL_NVLS_ENABLE", "0", "look"),
        ("NCCL_IB_DISABLE", "true", "wrong"),
        ("HF_HUB_OFFLINE", "1", "look"),
    ],
)
def test_variable_facts_judge_values(name: str, value: str, state: str) -> None:
    (fact,) = variable_facts({name: value}, cores=8, gpus=4)
    assert (fact.topic, fact.state) == (name, state) and bool(fact.remedy) == (state != "ok")


def test_variable_facts_never_show_a_token() -> None:
    (fact,) = variable_facts({"HF_TOKEN": "hf_abcdefghij0123456789"}, cores=8, gpus=0)
    assert fact == Fact("HF_TOKEN", "ok", "set")


def test_read_devices_without_nvml_is_one_line_to_look_at() -> None:
    """On a machine with a driver nothing is missing."""
    devices = read_devices()
    if not devices.names:
        (fact,) = devices.facts
        assert (fact.topic, fact.state) == ("GPUs", "look") and fact.remedy


def test_read_devices_of_two_gpus_has_a_fact_for_each_and_their_links(nvml: ModuleType) -> None:
    devices = read_devices()
    assert (devices.names, devices.driver, devices.cuda) == (["H100", "H100"], "570.1", (12, 8))
    assert states(devices.facts) == {"GPU 0": "look", "GPU 1": "look", "links of GPUs": "ok"}
    assert "slowed down by its temperature at 91 C" in devices.facts[1].text
    nvml.allowed = False
    assert "held by process 4242 (30.0 GiB)" in read_devices().facts[1].text
    assert nvml.calls == ["init", "shutdown"] * 2
    nvml.driver = False
    (fact,) = read_devices().facts
    assert (fact.state, fact.text) == ("look", "none is visible through NVML: Driver Not Loaded")


def test_software_facts_of_the_tested_versions_are_ok() -> None:
    facts = {fact.topic: fact for fact in software_facts(torch_build())}
    assert {"Python", "torch", "accelerate", "transformers"} <= facts.keys()
    assert {fact.state for fact in facts.values()} == {"ok"}


def test_software_facts_of_a_version_out_of_bounds_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is found before the installed packages, as in a stale environment."""
    from ftcli.runtime import environment

    text = "Metadata-Version: 2.1\nName: accelerate\nVersion: 0.1.0\n"
    write(tmp_path / "accelerate-0.1.0.dist-info" / "METADATA", text)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment._version.cache_clear()
    facts = {fact.topic: fact for fact in software_facts(torch_build())}
    environment._version.cache_clear()
    assert facts["accelerate"].state == "wrong" and facts["accelerate"].remedy.startswith("pip install 'accelerate")


def test_bytecode_facts_tell_why_each_process_compiles_a_package_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", None)
    package = tmp_path / "package" / "__init__.py"
    write(package, "")
    assert bytecode_facts(None, None, may_write=False) == bytecode_facts(package, None, may_write=True) == []
    (fact,) = bytecode_facts(package, None, may_write=False)
    assert fact.state == "look" and fact.text.startswith("PYTHONDONTWRITEBYTECODE is set and package has no bytecode")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != package.parent)
    (fact,) = bytecode_facts(package, None, may_write=True)
    assert fact.state == "look" and fact.text.startswith(f"{package.parent} is read-only")
    assert bytecode_facts(package, str(tmp_path), may_write=True) == []
    write(Path(importlib.util.cache_from_source(package)), "")
    assert bytecode_facts(package, None, may_write=False) == [], "pip has stored it"


@pytest.mark.parametrize(
    ("cuda", "driver", "state"),
    [("12.8", (12, 8), "ok"), ("12.8", (12, 4), "look"), ("13.0", (12, 8), "wrong"), (None, (12, 8), "wrong")],
)
def test_driver_facts_compare_the_runtime_with_the_driver(
    cuda: str | None, driver: tuple[int, int], state: str
) -> None:
    first, second = driver_facts(TorchBuild("2.13.0", cuda), "570.1", driver)
    assert first.state == "ok" and second.state == state
    assert driver_facts(TorchBuild("2.13.0", None), None, None) == []


def test_read_transports_of_recorded_lines_finds_each_pair() -> None:
    transports = read_transports((SOCKETS + INFINIBAND).splitlines())
    assert transports.pairs == {
        (8, 15): {"P2P/IPC/read"},
        (15, 6): {"NET/Socket/3"},
        (0, 2): {"NET/IB/3/GDRDMA"},
        (3, 1): {"NET/IB/2/GDRDMA"},
        (3, 2): {"P2P/CUMEM"},
    }
    older = read_transports(OLDER.splitlines())
    assert older.pairs == {(35, 34): {"NET/Socket/0"}} and older.has_ib is False


def test_transport_facts_of_a_fall_to_sockets_are_wrong_with_infiniband() -> None:
    transports = read_transports(SOCKETS.splitlines())
    machine_of = {rank: rank // 8 for rank in range(16)}
    assert states(transport_facts(transports, machine_of, rdma=True)) == {
        "NCCL inside a machine": "ok",
        "NCCL between machines": "wrong",
    }
    assert states(transport_facts(transports, machine_of, rdma=False))["NCCL between machines"] == "look"


def test_transport_facts_of_infiniband_with_gpudirect_are_ok_and_of_shared_memory_to_look_at() -> None:
    transports = read_transports(INFINIBAND.splitlines())
    inside, between = transport_facts(transports, {0: 0, 1: 0, 2: 1, 3: 1}, rdma=True)
    assert (inside.state, inside.text) == ("ok", "P2P/CUMEM")
    assert (between.state, between.text) == ("ok", "NET/IB/GDRDMA")
    (shared,) = transport_facts(read_transports(SHARED_MEMORY.splitlines()), {6: 0, 7: 0}, rdma=False)
    assert shared.state == "look"
    (leaves,) = transport_facts(read_transports(SOCKETS.splitlines()[1:]), {6: 0, 15: 0}, rdma=False)
    assert leaves.state == "wrong"


def machine(**versions: str) -> dict[str, object]:
    return {"host": "node", "versions": {"torch": "2.13.0", "driver": "570"} | versions, "variables": {}}


def test_comparison_facts_of_two_versions_name_both_machines() -> None:
    facts = comparison_facts({0: machine(), 1: machine(torch="2.11.0"), 2: machine(driver="560")})
    assert states(facts) == {"torch differs": "wrong", "driver differs": "look"}
    torch = next(fact for fact in facts if fact.topic == "torch differs")
    assert torch.text == "2.13.0 on machines 0, 2; 2.11.0 on machine 1"
    assert states(comparison_facts({0: machine(), 1: machine()})) == {"versions": "ok"}
    assert comparison_facts({0: machine()}) == []


def test_comparison_facts_of_different_variables_of_nccl_are_wrong() -> None:
    first, second = machine(), machine()
    first["variables"] = {"NCCL_IB_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    assert states(comparison_facts({0: first, 1: second})) == {
        "HF_HUB_OFFLINE differs": "look",
        "NCCL_IB_DISABLE differs": "wrong",
    }


def test_clock_fact_names_the_machine_that_is_off() -> None:
    fact = clock_fact({1: 0.02, 2: -7.5})
    assert fact.state == "look" and fact.text == "machine 2 is 7.50 s behind machine 0"
    assert clock_fact({1: 0.02}).state == "ok"


def test_fact_is_one_line_without_secrets() -> None:
    fact = Fact("x", "look", "a\n  b", "get https://user:secret@host/x")
    assert fact.text == "a b" and "secret" not in fact.remedy and os.linesep not in fact.remedy
