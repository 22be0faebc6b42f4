"""Weights are read once for all ranks and handed out: memory while loading, and what every rank then holds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ftcli.recipe import Recipe
from ftcli.testing import run_on_cpu

from .cells import CELLS, cell, write_inputs

HANDED_OUT = ["fsdp", "zero3"]
# Memory of several processes in bytes, summed, with the moment it was looked at; a page that two share counts once.
SAMPLER = """
import sys, time
paths = [f"/proc/{pid}/smaps_rollup" for pid in sys.argv[1:]]
while True:
    lines = [line for path in paths for line in open(path) if line.startswith("Pss:")]
    print(time.monotonic(), 1024 * sum(int(line.split()[1]) for line in lines), flush=True)
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def save_large_causal(folder: Path, *, tied: bool) -> Path:
    """Write a Llama of some 320 MB in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ftcli.testing import tiny_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24000 if tied else 12000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def load_and_watch(folder: Path, names: list[str]) -> dict[str, dict[str, float]]:
    """Return the growth in bytes, summed over ranks, that loading each model took at most, and the size of its file.

    Loading ends where every rank has its part: what DeepSpeed then makes of it (float32 masters, buffers for
    gradients) is training's memory.
    """
    import os

    import deepspeed
    import torch.distributed as dist

    from ftcli.run import prepare

    prepare(cell(folder, "sft-tied"), cpu=True)  # imports, and what libraries keep
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    ended: list[float] = []
    initialize = deepspeed.initialize
    deepspeed.initialize = lambda *args, **kwargs: (dist.barrier(), ended.append(time.monotonic())) and initialize(
        *args, **kwargs
    )
    found = {}
    for name in names:
        model = {"name": str(folder / name), "dropout": 0.0}
        dist.barrier()
        began = time.monotonic()
        sampler = None
        if dist.get_rank() == 0:
            command = [sys.executable, "-c", SAMPLER, *map(str, pids)]
            sampler = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            time.sleep(1)
        dist.barrier()
        ended.clear()
        prepared = prepare(cell(folder, "sft-tied", model=model), cpu=True)
        dist.barrier()
        ended.append(time.monotonic())
        if sampler is not None:
            sampler.kill()
            rows = [line.split() for line in (sampler.communicate()[0] or "").splitlines() if line.count(" ") == 1]
            sizes = [int(size) for moment, size in rows if began <= float(moment) <= ended[0]]
            size = (folder / name / "model.safetensors").stat().st_size
            found[name] = {"samples": len(sizes), "most": max(sizes) - sizes[0], "file": size}
        del prepared
    return found


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("profile", HANDED_OUT)
def test_loading_takes_less_than_one_and_a_half_times_the_weights_over_all_ranks(
    profile: str, processes: int, inputs: Path, tmp_path: Path
) -> None:
    for name in ("large-tied", "large-untied"):
        if not (inputs / name).exists():
            save_large_causal(inputs / name, tied=name == "large-tied")
    found = run_on_cpu(load_and_watch, inputs, ["large-tied", "large-untied"], processes=processes, profile=profile)[0]
    print(json.dumps(found))
    for name, sizes in found.items():
        assert sizes["file"] > 300e6
        assert sizes["samples"] > 20
        assert 0.5 * sizes["file"] < sizes["most"] < 1.5 * sizes["file"], (name, sizes)
