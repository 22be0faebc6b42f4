"""Train the peer `bare`: a minimal Accelerate loop over packed rows. Its curve is the reference for all other peers.

It uses transformers' model, variable-length attention, Liger's kernels if they are installed, and fused AdamW. It has
no checks, reports or checkpoints. Settings: `attn_implementation` (varlen: torch's kernel; or a name of transformers),
`liger` (0 or 1), `gradient_checkpointing` (0 or 1), `compile` (0 or 1: each layer), `constant` (0 or 1: pads every
micro-batch to the same number of tokens, so that kernels which depend on the number of tokens are compiled once).
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
from typing import Any

import numpy as np
import torch

from .adapters import four_bits, with_adapter
from .cell import Cell, Inputs, Measured
from .clock import Clock
from .rows import Documents, PackedRows

VARLEN = "varlen"


def train(cell: Cell, inputs: Inputs, clock: Clock) -> Measured:
    """Train the cell's steps."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    options = settings(cell)
    precision = "bf16" if cell.precision == "bf16" else "no"
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=cell.accumulation)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.state.deepspeed_plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": cell.micro_size,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
        }
    model = load(cell, inputs, options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    is_fused = accelerator.device.type == "cuda"
    optimizer = torch.optim.AdamW(trained, lr=cell.learning_rate, weight_decay=0.0, fused=is_fused)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = PackedRows(inputs.rows, cell.global_size)
    tokens = cell.length * cell.micro_size if options["constant"] else 0
    assignment = {
        "micro_size": cell.micro_size,
        "rank": accelerator.process_index,
        "processes": accelerator.num_processes,
    }
    gc.collect()
    gc.disable()
    for number in range(cell.steps):
        items = rows.step(number).items / accelerator.num_processes  # gradients are averaged over ranks
        losses = []
        for documents in rows.micro_batches(number, **assignment):
            with accelerator.accumulate(model):
                batch = to_batch(documents, accelerator.device, tokens)
                loss = model(**batch, num_items_in_batch=items, use_cache=False).loss
                accelerator.backward(loss * cell.accumulation)
                losses.append(loss.detach())
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else None
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        clock.mark(sum(losses), norm)
    measured = clock.read(**options)
    accelerator.end_training()
    return measured


def settings(cell: Cell) -> dict[str, Any]:
    """Return the settings with their defaults filled in; raises `ValueError` for an unknown one."""
    defaults = {
        "attn_implementation": "sdpa" if cell.cpu else VARLEN,
        "liger": str(int(importlib.util.find_spec("liger_kernel") is not None and not cell.cpu)),
        "gradient_checkpointing": "0",
        "compile": "0",
        "constant": "0",
    }
    if unknown := set(cell.named) - set(defaults):
        raise ValueError(f"the peer bare has no setting {sorted(unknown)[0]}; it has {', '.join(defaults)}")
    return {name: int(v) if v.isdigit() else v for name, v in (defaults | cell.named).items()}


def load(cell: Cell, inputs: Inputs, options: dict[str, Any]) -> Any:
    """Return the model of the cell, in training mode and on the host."""
    from transformers import AutoModelForCausalLM

    if options["attn_implementation"] == VARLEN:
        register_varlen()
    dtype = torch.bfloat16 if cell.precision == "bf16_pure" or cell.lora else torch.float32
    kernel = options["attn_implementation"]
    quantised = {"quantization_config": four_bits(), "device_map": {"": 0}} if cell.four_bit else {}
    model = AutoModelForCausalLM.from_pretrained(inputs.model, dtype=dtype, attn_implementation=kernel, **quantised)
    if options["liger"]:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model)
    if cell.lora:
        model = with_adapter(model, inputs.adapter)
    if options["gradient_checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if options["compile"]:
        for layer in model.get_decoder().layers:
            layer.compile()
    return model.train()


def to_batch(documents: Documents, device: torch.device, tokens: int = 0) -> dict[str, Any]:
    """Return one row `[1, T]` with the bounds of its documents. The copy to the device is asynchronous.

    A shorter row is padded to `tokens` tokens by one more document that is not trained.
    """
    if (missing := tokens - len(documents.ids)) > 0:
        documents = Documents(
            np.pad(documents.ids, (0, missing)),
            np.pad(documents.trained, (0, missing)),
            np.append(documents.lengths, missing),
        )
    bounds = torch.from_numpy(np.concatenate([[0], np.cumsum(documents.lengths)]).astype(np.int32))
    tensors = {
        "input_ids": torch.from_numpy(documents.ids.astype(np.int64))[None],
        "labels": torch.from_numpy(documents.labels)[None],
        "position_ids": torch.from_numpy(documents.positions)[None],
        "cu_seq_lens_q": bounds,
    }
    if device.type == "cuda":
        tensors = {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}
    longest = int(documents.lengths.max())
    shared = {"cu_seq_lens_k": tensors["cu_seq_lens_q"], "max_length_q": longest, "max_length_k": longest}
    return tensors | shared if device.type == "cuda" else {k: v for k, v in tensors.items() if k != "cu_seq_lens_q"}


def register_varlen() -> None:
    """Register torch's variable-length attention in transformers, without an attention mask."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface, AttentionMaskInterface

    known = inspect.signature(varlen_attn).parameters

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **rest: Any) -> tuple[Any, None]:
        groups, kernel_options = query.shape[1] // key.shape[1], {"window_size": (-1, 0), "scale": rest.get("scaling")}
        if "enable_gqa" in known:
            kernel_options["enable_gqa"] = True
        else:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        half = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
        q, k, v = (tensor[0].transpose(0, 1).to(half) for tensor in (query, key, value))
        bounds, longest = rest["cu_seq_lens_q"], rest["max_length_q"]
        return varlen_attn(q, k, v, bounds, bounds, longest, longest, **kernel_options)[None], None

    AttentionInterface.register(VARLEN, attend)
    AttentionMaskInterface.register(VARLEN, lambda *args, **kwargs: None)
