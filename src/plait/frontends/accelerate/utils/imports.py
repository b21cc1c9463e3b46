"""`accelerate.utils.imports`: what this machine and this environment have."""

from __future__ import annotations

from importlib.util import find_spec

import torch


def _there(package: str) -> bool:
    return find_spec(package) is not None


def is_wandb_available() -> bool:
    """Whether wandb is installed."""
    return _there("wandb")


def is_tensorboard_available() -> bool:
    """Whether TensorBoard is installed."""
    return _there("tensorboard") or _there("tensorboardX")


def is_transformers_available() -> bool:
    """Whether transformers is installed."""
    return _there("transformers")


def is_datasets_available() -> bool:
    """Whether datasets is installed."""
    return _there("datasets")


def is_peft_available() -> bool:
    """Whether peft is installed."""
    return _there("peft")


def is_rich_available() -> bool:
    """Whether rich is installed; Plait needs it."""
    return True


def is_deepspeed_available() -> bool:
    """Whether DeepSpeed's words can be used: always, and nothing of DeepSpeed is needed for it."""
    return True


def is_megatron_lm_available() -> bool:
    """Whether Megatron-LM is there: its engine never is."""
    return False


def is_cuda_available() -> bool:
    """Whether there is a CUDA device."""
    return torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether there is a device of Apple's; Plait does not train on it."""
    return False


def is_xpu_available(check_device: bool = False) -> bool:
    """Whether there is a device of Intel's."""
    return torch.xpu.is_available()


def is_npu_available(check_device: bool = False) -> bool:
    """Whether there is an Ascend device; Plait does not train on it."""
    return False


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is used; Plait does not train with it."""
    return False


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether the device computes in bf16."""
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True
