"""Train the peer `torchtitan` (0.2): its own Llama, parallelism and loop, on the cell's weights and packed rows.

It supports only the profile fsdp and models with an untied head. torchtitan finds the documents of a row by their end
tokens. Rotary positions do not restart with each document, because only their differences matter. Rows are padded to
the full length. Settings: `compile` (1 or 0), `activation_checkpoint` (none, selective, full), `attn_type` (varlen,
flex).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .cell import Cell, Inputs, Measured
from .clock import Clock
from .rows import PackedRows

NAME = "cell"
END = 1  # end token of the cell's tokenizer


def train(cell: Cell, inputs: Inputs, clock: Clock) -> Measured:
    """Train the cell's steps; raises `ValueError` for a cell that torchtitan does not support."""
    from torchtitan import train as program
    from torchtitan.protocols.train_spec import register_train_spec

    options = settings(cell)
    arguments = model_arguments(inputs.model, options["attn_type"])
    register_train_spec(NAME, spec(arguments, PackedRows(inputs.rows, cell.global_size), cell))
    with tempfile.TemporaryDirectory() as folder:
        trainer = watched(program, clock, cell.processes)(configuration(cell, options, folder))
        load_weights(trainer.model_parts[0], inputs.model, arguments)
        trainer.train()
        measured = clock.read(**options)
        trainer.close()
    torch.distributed.destroy_process_group()
    return measured


def settings(cell: Cell) -> dict[str, str]:
    """Return the settings with their defaults filled in."""
    defaults = {"compile": "1", "activation_checkpoint": "none", "attn_type": "varlen"}
    if unknown := set(cell.named) - set(defaults):
        raise ValueError(f"the peer torchtitan has no setting {sorted(unknown)[0]}; it has {', '.join(defaults)}")
    if cell.profile != "fsdp" or cell.lora or cell.precision != "bf16":
        raise ValueError("the peer torchtitan trains all weights under the profile fsdp with precision bf16")
    return defaults | cell.named


def model_arguments(model: Path, attn_type: str) -> Any:
    """Return torchtitan's description of a Llama of transformers."""
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama" or config["tie_word_embeddings"]:
        raise ValueError("the peer torchtitan trains Llamas whose head is not tied to their embeddings")
    inner, plain = config["intermediate_size"], int(8 * config["hidden_size"] / 3)
    return TransformerModelArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        vocab_size=config["vocab_size"],
        multiple_of=32,  # torchtitan rounds up to a multiple of this; the factor gives a width just below the exact one
        ffn_dim_multiplier=(inner - 1) / plain,
        norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
        attn_type=attn_type,
        attn_mask_type="causal" if attn_type == "sdpa" else "block_causal",
        eos_id=END,
    )


def spec(arguments: Any, rows: PackedRows, cell: Cell) -> Any:
    """Return torchtitan's Llama 3 with the cell's sizes and rows."""
    from dataclasses import replace

    from torchtitan.models import llama3

    def loader(dp_world_size: int, dp_rank: int, **rest: Any) -> Loader:
        return Loader(rows, cell, dp_rank, dp_world_size)

    return replace(
        llama3.get_train_spec(),
        model_args={NAME: arguments},
        build_dataloader_fn=loader,
        build_tokenizer_fn=lambda job_config: SimpleNamespace(eos_id=END),
    )


class Loader:
    """The micro-batches of one rank: {"input": `[B, T]`} and the labels of the next tokens `[B, T]`."""

    def __init__(self, rows: PackedRows, cell: Cell, rank: int, processes: int) -> None:
        self.rows, self.cell, self.rank, self.processes = rows, cell, rank, processes

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        micro = self.cell.micro_size
        starts = range(0, len(self.rows), micro)
        for start in starts[self.rank :: self.processes]:
            rows = [self.rows.span(number, number + 1) for number in range(start, start + micro)]
            ids = np.stack([self._filled(row.ids, 0) for row in rows])
            labels = np.stack([self._filled(row.labels[1:], -100) for row in rows])
            yield {"input": torch.from_numpy(ids)}, torch.from_numpy(labels)

    def _filled(self, values: Any, value: int) -> Any:
        """Return int64 values padded to the full length."""
        return np.pad(np.asarray(values, dtype=np.int64), (0, self.cell.length - len(values)), constant_values=value)

    def state_dict(self) -> dict[str, Any]:
        """Return no state, because the run is never resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state."""


def configuration(cell: Cell, options: dict[str, str], folder: str) -> Any:
    """Return torchtitan's configuration of a cell."""
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.job.dump_folder = folder
    config.model.name = config.model.flavor = NAME
    config.optimizer.lr, config.optimizer.beta2, config.optimizer.weight_decay = cell.learning_rate, 0.999, 0.0
    config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio = 0, 0.0  # constant
    config.training.local_batch_size, config.training.global_batch_size = cell.micro_size, cell.global_size
    config.training.seq_len, config.training.steps = cell.length, cell.steps
    config.parallelism.data_parallel_shard_degree = cell.processes
    config.activation_checkpoint.mode = options["activation_checkpoint"]  # type: ignore[assignment]
    config.compile.enable = options["compile"] == "1"
    return config


def load_weights(model: Any, folder: Path, arguments: Any) -> None:
    """Load the weights of a transformers folder into a sharded model. A collective; rank 0 reads the files."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    weights: dict[str, Any] = {}
    if torch.distributed.get_rank() == 0:
        tensors = {
            name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()
        }
        weights = {n: value.float() for n, value in Llama3StateDictAdapter(arguments, None).from_hf(tensors).items()}
    set_model_state_dict(
        model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
    )


def watched(program: Any, clock: Clock, processes: int) -> type:
    """Return a subclass of torchtitan's Trainer that records its steps without waiting for the device."""
    clip, norms = program.dist_utils.clip_grad_norm_, []

    def clip_and_keep(*args: Any, **kwargs: Any) -> Any:
        norms.append(clip(*args, **kwargs))
        return norms[-1]

    program.dist_utils.clip_grad_norm_ = clip_and_keep

    class Watched(program.Trainer):  # type: ignore[misc]
        losses: list[torch.Tensor] = []

        def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().forward_backward_step(**kwargs)
            self.losses.append(loss.detach() * processes)  # each rank's loss is its part of the sum over ranks
            return loss

        def train_step(self, data_iterator: Any) -> None:
            super().train_step(data_iterator)
            clock.mark(sum(self.losses), norms.pop())
            self.losses.clear()

    return Watched
