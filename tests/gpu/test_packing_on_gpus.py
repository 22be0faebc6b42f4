"""Documents in one row on a GPU: torch's own kernel in half precision, the loop in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.testing import run_on_processes

from ..support.cells import cell
from ..support.runner import MakeInputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"padding_free": False},
    "padding-free": {"padding_free": True},
    "packed": {"packing": True},
}
MOST = {"fp32": 1e-4, "bf16": 1e-2}  # of the loss, relative; the kernels are others


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    folder = make_inputs()
    chats = folder / "chats.jsonl"
    chats.write_text(chats.read_text() * 4)  # packed rows are fewer, and a step takes twelve
    return folder


def losses(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the curve of each layout in each precision: a start of ranks takes longer than any of them."""
    return {precision: losses_in(precision, folder) for precision in MOST}


def losses_in(precision: str, folder: Path) -> dict[str, list[float]]:
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    results = {}
    for name, layout in LAYOUTS.items():
        data = {"train": {"path": str(folder / "chats.jsonl")}, "eval_rows": 5, "max_length": 256} | layout
        results[name] = [step.loss for step in steps(prepare(cell(folder, "sft-tied", precision=precision, data=data)))]
    return results


@pytest.fixture(scope="module")
def single(inputs: Path) -> dict[str, dict[str, list[float]]]:
    return run_on_processes(losses, inputs, processes=1, profile="single")[0]


@pytest.mark.parametrize("precision", MOST)
def test_padding_free_rows_give_the_curve_of_padded_rows(
    precision: str, single: dict[str, dict[str, list[float]]]
) -> None:
    actual = single[precision]
    assert actual["padding-free"] == pytest.approx(actual["padded"], rel=MOST[precision])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("profile", ["ddp", "fsdp", "zero3"])
def test_packing_on_two_gpus_gives_the_curve_of_one(
    profile: str, inputs: Path, single: dict[str, dict[str, list[float]]]
) -> None:
    for rank in run_on_processes(losses, inputs, processes=2, profile=profile):
        for precision, most in MOST.items():
            assert rank[precision]["packed"] == pytest.approx(single[precision]["packed"], rel=most)


@pytest.mark.parametrize("flash", [False, True])
def test_packed_kernel_gives_each_document_its_own_result(flash: bool) -> None:
    from ftcli.models.kernels.document_attention import attend

    torch.manual_seed(0)
    lengths = [3, 70, 1, 200]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
    query, key, value = (
        torch.randn(1, heads, sum(lengths), 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)
    )
    module = torch.nn.Identity()
    module.is_causal, module.num_key_value_groups = True, 2
    attend(module, query, key, value, bounds[None, None, None], max_length_q=200, flash=flash)  # compiles itself
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            whole, _ = attend(module, query, key, value, bounds[None, None, None], max_length_q=200, flash=flash)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone, _ = attend(module, query[:, :, part], key[:, :, part], value[:, :, part], None)
        torch.testing.assert_close(whole[:, part], alone, rtol=2e-2, atol=2e-2)
        start += length


def test_packed_attention_with_unsupported_head_size_uses_the_loop() -> None:
    from ftcli.models.kernels.document_attention import attend

    bounds = torch.tensor([[[[0, 3, 8]]]], dtype=torch.int32, device="cuda")
    query, key, value = torch.randn(3, 1, 2, 8, 12, device="cuda", dtype=torch.bfloat16)
    module = torch.nn.Identity()
    module.is_causal = True
    whole, _ = attend(module, query, key, value, bounds, max_length_q=5)
    for part in (slice(0, 3), slice(3, 8)):
        alone, _ = attend(module, query[:, :, part], key[:, :, part], value[:, :, part], None)
        torch.testing.assert_close(whole[:, part], alone)
