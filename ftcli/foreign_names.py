"""What other fine-tuning tools (TRL, Axolotl, LLaMA-Factory, transformers, peft) call what a recipe says
here.

Used for one thing only: the hint under "unknown key". Every path in RENAMED is a key of the recipe; a test
holds it.
"""

from __future__ import annotations

RENAMED = {
    "adapter_name_or_path": "adapter.path",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "alpha": "adapter.lora_alpha",
    "attention_implementation": "model.attn_implementation",
    "additional_target": "adapter.modules_to_save",
    "base_model": "model.name",
    "batch_size": "batch.global_size",
    "cutoff_len": "data.max_length",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "dataset_path": "data.train",
    "dataset_prepared_path": "data.train",
    "datasets": "data.train",
    "dataloader_num_workers": "data.workers",
    "eval_dataset": "data.eval",
    "eval_steps": "evaluate.every_steps",
    "finetuning_type": "adapter.type",
    "flash_attention": "model.attn_implementation",
    "flash_attn": "model.attn_implementation",
    "global_batch_size": "batch.global_size",
    "gradient_clipping": "optimizer.max_grad_norm",
    "learning_rate_scheduler": "schedule.name",
    "logging_steps": "log.every_steps",
    "lora_modules_to_save": "adapter.modules_to_save",
    "lora_model_dir": "adapter.path",
    "lora_r": "adapter.r",
    "lora_rank": "adapter.r",
    "lora_target": "adapter.target_modules",
    "lora_target_modules": "adapter.target_modules",
    "lr": "optimizer.learning_rate",
    "lr_scheduler": "schedule.name",
    "lr_scheduler_type": "schedule.name",
    "max_len": "data.max_length",
    "max_norm": "optimizer.max_grad_norm",
    "max_seq_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "micro_batch_size": "batch.micro_size",
    "min_lr_ratio": "schedule.min_ratio",
    "mixed_precision": "precision",
    "model_id": "model.name",
    "model_name": "model.name",
    "model_name_or_path": "model.name",
    "model_revision": "model.revision",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "num_train_steps": "train.max_steps",
    "num_workers": "data.workers",
    "new_special_tokens": "model.new_tokens",
    "optim": "optimizer.name",
    "output_dir": "output",
    "per_device_train_batch_size": "batch.micro_size",
    "rank": "adapter.r",
    "report_to": "log.trackers",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "seq_len": "data.max_length",
    "sequence_len": "data.max_length",
    "sequence_length": "data.max_length",
    "quantization_config": "model.quantization",
    "stage": "task",
    "test_datasets": "data.eval",
    "test_size": "data.eval_rows",
    "torch_dtype": "model.dtype",
    "total_batch_size": "batch.global_size",
    "train_batch_size": "batch.global_size",
    "train_dataset": "data.train",
    "use_gradient_checkpointing": "model.gradient_checkpointing",
    "val_set_size": "data.eval_rows",
    "val_size": "data.eval_rows",
    "warmup_ratio": "schedule.warmup_steps",
}

_PROFILE = "that is a fact about machines: it belongs in a profile (--profile)"

EXPLAINED = {
    "accelerator_config": _PROFILE,
    "bf16": "write precision: bf16",
    "ddp_find_unused_parameters": _PROFILE,
    "deepspeed": _PROFILE,
    "deepspeed_config": _PROFILE,
    "distributed_type": _PROFILE,
    "do_eval": "evaluation happens whenever data.eval or data.eval_rows is given",
    "do_train": "`ftcli train` trains, `ftcli evaluate` evaluates",
    "eval_strategy": "write evaluate.every_steps",
    "evaluation_strategy": "write evaluate.every_steps",
    "fp16": "write precision: fp16",
    "fsdp": _PROFILE,
    "fsdp_config": _PROFILE,
    "gradient_accumulation_steps": "derived from batch.global_size, never written: delete this line",
    "bnb_4bit_compute_dtype": "it is the recipe's precision: delete this line",
    "bnb_4bit_quant_storage": "it follows from precision and model.dtype: delete this line",
    "load_in_8bit": "a base model of 8 bits is not offered: delete this line, or load_in_4bit in model.quantization",
    "logging_dir": "logs are written into the run folder (output): delete this line",
    "num_gpus": _PROFILE,
    "num_processes": _PROFILE,
    "packing": "packing is not supported yet: delete this line",
    "pad_to_max_length": "rows are padded to the longest of their micro-batch: delete this line",
    "per_device_eval_batch_size": "evaluation uses batch.micro_size: delete this line",
    "remove_unused_columns": "columns are named in data.columns: delete this line",
    "resume_from_checkpoint": "give --resume auto, or --resume DIR, on the command line",
    "sample_packing": "packing is not supported yet: delete this line",
    "tf32": "not a recipe's choice yet: delete this line",
    "use_cpu": "give --cpu on the command line",
}


def foreign_hint(key: str) -> str:
    """Return the hint for a key that another tool uses, or an empty string."""
    name = key.lower().replace("-", "_")
    if name in EXPLAINED:
        return EXPLAINED[name]
    return f"that is {RENAMED[name]} here" if name in RENAMED else ""
