"""Which kernel computes attention."""

from __future__ import annotations

import torch

from plait.errors import ConfigError, Problem


def choose_attention(word: str, device: torch.device) -> None:
    """Let torch take this kernel only, or the plain form where the kernel cannot do what is asked.

    For the whole process, as torch keeps it: what is recomputed in the backward pass must meet the same kernel. `auto`
    leaves the choice to torch, which prefers cuDNN's on Hopper and later, and FlashAttention before that.
    """
    if word == "auto":
        return
    if device.type != "cuda":
        raise ConfigError(
            Problem(
                "strategy.attention", f"{word!r} is a kernel for CUDA, and the device is {device.type}", "Leave it out."
            )
        )
    cuda = torch.backends.cuda
    cuda.enable_cudnn_sdp(word == "cudnn")
    cuda.enable_flash_sdp(word == "flash")
    cuda.enable_mem_efficient_sdp(word == "efficient")
    cuda.enable_math_sdp(True)
