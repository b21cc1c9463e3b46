"""What is said of a name of DeepSpeed that is not offered here."""

from __future__ import annotations

from plait.frontends import Absent

_INSTEAD = {
    "DeepSpeedTransformerLayer": "torch's own attention is fused; use the model as it is",
    "DeepSpeedTransformerConfig": "torch's own attention is fused; use the model as it is",
    "DeepSpeedHybridEngine": "generate from the model that trains with plait.generate",
    "DeepSpeedConfig": "plait.frontends.deepspeed.config.translate reads a configuration, with an account of every key",
    "tp_model_init": "`tensor_parallel: {autotp_size: n}` in the configuration does the same",
    "module_inject": "`tensor_parallel: {autotp_size: n}` in the configuration spreads a model's layers",
    "onebit": "compressed optimizers are gone from DeepSpeed 0.19 too; use AdamW",
    "compression": "there is no compression of models here",
    "autotuning": "`plait tune` looks for the fastest settings",
    "profiling": "`plait profile` measures a step's operations, memory and time",
    "nebula": "`checkpoint.async_save` writes checkpoints while training goes on",
    "sequence": "`strategy.layout.cp` with `plait train` spreads sequences",
    "linear": "LoRA models of peft train as they are",
}

_ABSENT = Absent("plait.frontends.deepspeed", "deepspeed", "DeepSpeed", "docs/deepspeed-api.md", _INSTEAD)
not_offered = _ABSENT.not_offered
explain_absent_modules = _ABSENT.explain_modules
