from __future__ import annotations

import torch
from tests.refusals import refused

from plait.errors import ConfigError
from plait.kernels.registry import choose_attention


def state() -> tuple[bool, bool, bool, bool]:
    cuda = torch.backends.cuda
    return cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


def test_one_kernel_is_left_and_the_plain_form() -> None:
    before = state()
    try:
        choose_attention("auto", torch.device("cuda"))
        assert state() == before
        for index, word in enumerate(("cudnn", "flash", "efficient")):
            choose_attention(word, torch.device("cuda"))
            assert state() == (*(number == index for number in range(3)), True)
    finally:
        cuda = torch.backends.cuda
        cuda.enable_cudnn_sdp(before[0])
        cuda.enable_flash_sdp(before[1])
        cuda.enable_mem_efficient_sdp(before[2])


def test_a_kernel_for_cuda_is_refused_elsewhere() -> None:
    with refused(ConfigError, "'flash'", "CUDA", "cpu", key="strategy.attention"):
        choose_attention("flash", torch.device("cpu"))
