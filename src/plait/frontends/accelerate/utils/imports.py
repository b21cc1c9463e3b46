"""`accelerate.utils.imports`: which packages and devices are available."""

from __future__ import annotations

from importlib.util import find_spec

import torch


def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


def is_wandb_available() -> bool:
    """Whether wandb is installed."""
    return _is_installed("wandb")


def is_tensorboard_available() -> bool:
    """Whether TensorBoard is installed."""
    return _is_installed("tensorboard") or _is_installed("tensorboardX")


def is_transformers_available() -> bool:
    """Whether transformers is installed."""
    return _is_installed("transformers")


def is_datasets_available() -> bool:
    """Whether datasets is installed."""
    return _is_installed("datasets")


def is_peft_available() -> bool:
    """Whether peft is installed."""
    return _is_installed("peft")


def is_rich_available() -> bool:
    """Whether rich is installed; Plait needs it."""
    return True


def is_deepspeed_available() -> bool:
    """Whether DeepSpeed's options can be used: always; the package is not needed."""
    return True


def is_megatron_lm_available() -> bool:
    """Whether Megatron-LM's engine can be used: never."""
    return False


def is_cuda_available() -> bool:
    """Whether there is a CUDA device."""
    return torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether Plait trains on an Apple GPU: it does not."""
    return False


def is_xpu_available(check_device: bool = False) -> bool:
    """Whether there is an Intel GPU."""
    return torch.xpu.is_available()


def is_npu_available(check_device: bool = False) -> bool:
    """Whether Plait trains on an Ascend NPU: it does not."""
    return False


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether Plait trains with torch_xla: it does not."""
    return False


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether the device computes in bf16."""
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True
