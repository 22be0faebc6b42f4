"""Weights that threads copy to a GPU through pinned buffers, from the mapped files of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ftcli.hardware import weight_transfer
from ftcli.hardware.ddp import DDP

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def from_file(path: Path) -> Any:
    """Return a model whose weights are in a mapped file, as transformers leaves them."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    torch.manual_seed(0)
    sizes = {"wide": (3, 1023, 2048), "odd": (1_000_003,), "small": (17,)}
    values = {name: torch.randn(size).to(torch.bfloat16) for name, size in sizes.items()}
    save_file(values, path)
    model = nn.Module()
    model.file = safe_open(path, framework="pt")
    for name in values:
        setattr(model, name, nn.Parameter(model.file.get_slice(name)[...], requires_grad=name == "odd"))
    model.tied = model.wide
    model.register_buffer("table", torch.arange(300_000))
    return model


def test_before_prepare_copies_large_weights_from_pinned_memory_with_all_bits(tmp_path: Path) -> None:
    from accelerate import Accelerator

    device = Accelerator().device
    model, expected = from_file(tmp_path / "a.safetensors"), from_file(tmp_path / "b.safetensors").to(device)
    tied = model.wide
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as events:
        moved = DDP().before_prepare(Accelerator(), model)
        torch.cuda.synchronize()
    assert moved is model and model.wide is model.tied is tied
    for (name, value), (_, want) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert value.device == want.device and value.requires_grad == want.requires_grad and value.equal(want), name
    assert model.table.is_cuda
    copies = [event.name for event in events.events() if "HtoD" in event.name]
    large = [model.wide, model.odd]
    assert sum("Pinned" in name for name in copies) == sum(-(-w.nbytes // weight_transfer.BLOCK_BYTES) for w in large)
    assert sum("Pageable" in name for name in copies) <= 2, "the small weight and the buffer"


def test_without_pinned_memory_one_thread_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("no pinned memory is left")

    model = from_file(tmp_path / "a.safetensors")
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    monkeypatch.setattr(weight_transfer, "PinnedLane", fails)
    moved = weight_transfer.move(model, torch.device("cuda", torch.cuda.current_device()))
    for name, value in moved.named_parameters():
        assert value.is_cuda and value.cpu().equal(expected[name]), name
