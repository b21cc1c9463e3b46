"""Words of other frameworks, and the Plait key that says the same."""

from __future__ import annotations

_WORDS = {
    # DeepSpeed
    "train_batch_size": "batch.total",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulation",
    "gradient_clipping": "train.clip_norm",
    "zero_optimization": "strategy.zero",
    "stage": "strategy.zero",
    "reduce_bucket_size": "strategy.bucket_mb",
    "fp16": "precision (`precision: fp16`; its loss scale is `precision.scaler`)",
    "bf16": "precision (`precision: bf16`)",
    "amp": "precision (`precision: bf16` or `fp16`)",
    "torch_autocast": "precision",
    "communication_data_type": "precision.reduce",
    "initial_scale_power": "precision.scaler.initial_power",
    "loss_scale": "precision.scaler.static",
    "loss_scale_window": "precision.scaler.window",
    "min_loss_scale": "precision.scaler.minimum",
    "optimizer": "optim",
    "params": "the section itself (`optim: {type: AdamW, lr: 1e-3}`)",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "activation_checkpointing": "strategy.recompute",
    "steps_per_print": "log.every",
    "tensorboard": "log.sinks (`log: {sinks: [tensorboard]}`)",
    "csv_monitor": "log.sinks (`log: {sinks: [csv]}`)",
    "wandb": "log.sinks (`log: {sinks: [wandb]}`)",
    # PyTorch FSDP and Accelerate
    "fsdp": "strategy (`strategy: fsdp`)",
    "fsdp_config": "strategy (`strategy: {sharding: FULL_SHARD}`)",
    "sharding_strategy": "strategy.sharding",
    "fsdp_sharding_strategy": "strategy.sharding",
    "auto_wrap_policy": "strategy.wrap",
    "fsdp_transformer_layer_cls_to_wrap": "strategy.wrap.classes",
    "mixed_precision": "precision",
    "mp_policy": "precision",
    "distributed_type": "strategy",
    "deepspeed_config": "strategy (`strategy: zero3`)",
    "dynamo_config": "strategy.compile",
    # Transformers
    "output_dir": "work_dir",
    "learning_rate": "optim.lr",
    "per_device_train_batch_size": "batch.micro",
    "num_train_epochs": "train.max_epochs",
    "max_grad_norm": "train.clip_norm",
    "lr_scheduler_type": "schedule.type",
    "warmup_steps": "schedule.warmup",
    "gradient_checkpointing": "strategy.recompute",
    "torch_compile": "strategy.compile",
    "logging_steps": "log.every",
    "eval_steps": "train.val_every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "resume_from_checkpoint": "checkpoint.resume",
    "report_to": "log.sinks",
    # MMEngine
    "work_dirs": "work_dir",
    "train_cfg": "train",
    "val_cfg": "train.val_every",
    "val_interval": "train.val_every",
    "max_iters": "train.max_steps",
    "train_dataloader": "data (with `batch.micro` for its batch size)",
    "val_dataloader": "val_data",
    "test_dataloader": "test_data",
    "optim_wrapper": "optim (with `train.clip_norm`, `batch.accumulation` and `precision` for the rest of it)",
    "clip_grad": "train.clip_norm",
    "accumulative_counts": "batch.accumulation",
    "param_scheduler": "schedule",
    "model_wrapper_cfg": "strategy",
    "default_hooks": "log and checkpoint",
    "custom_hooks": "hooks",
    "visualizer": "log.sinks",
    "randomness": "seed and deterministic",
    "env_cfg": "backend",
    "load_from": "checkpoint.resume",
    "max_keep_ckpts": "checkpoint.keep",
    # Lightning
    "accelerator": "device",
    "accumulate_grad_batches": "batch.accumulation",
    "gradient_clip_val": "train.clip_norm",
    "callbacks": "hooks",
    "default_root_dir": "work_dir",
    "log_every_n_steps": "log.every",
    # torchtitan
    "parallelism": "strategy.layout",
    "activation_checkpoint": "strategy.recompute",
    "training": "train and batch",
    "metrics": "log",
    "data_parallel_shard_degree": "strategy.layout.dp_shard",
    "data_parallel_replicate_degree": "strategy.layout.dp_replicate",
    "tensor_parallel_degree": "strategy.layout.tp",
    "pipeline_parallel_degree": "strategy.layout.pp",
    "context_parallel_degree": "strategy.layout.cp",
    "expert_parallel_degree": "strategy.layout.ep",
    "pipeline_parallel_schedule": "strategy.pipeline.schedule",
    # Megatron
    "tensor_model_parallel_size": "strategy.layout.tp",
    "pipeline_model_parallel_size": "strategy.layout.pp",
    "context_parallel_size": "strategy.layout.cp",
    "expert_model_parallel_size": "strategy.layout.ep",
    "sequence_parallel": "strategy.tensor.sequence_parallel",
}


def plait_key(word: str) -> str | None:
    """What Plait calls `word`, where it is a word of another framework."""
    key = _WORDS.get(word)
    if key is None:
        return None
    name, bracket, rest = key.partition(" (")
    names = " and ".join(f"`{each}`" for each in name.split(" and "))
    return f"In Plait this is {names}{bracket}{rest}."
