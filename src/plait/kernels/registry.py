"""Which implementation computes each operation: torch's or Plait's own, and the measurement behind the choice.

`OPERATIONS` has a row per operation, which `implementation` looks up. If the row lists `plait`, Plait's kernel runs
where it supports the device and the dtype; elsewhere its plain form runs, which consists of torch operations and which
tests compare the kernel with. If the row lists `torch` alone, torch's implementation always runs, and the row says why.
Fused norms, gated feed-forwards and rotary embeddings replace a model's modules only where `strategy.kernels` is
`auto`; see `models.fused`.

`liger` is not among the implementations. Liger-Kernel's norms, gates, rotary embeddings and cross-entropy are Triton
kernels of the same operations; it is not installed where Plait is tested and measured, so neither its results nor its
speed could be checked. It would have to do what Plait's kernels do: run with fake tensors for `plait plan`, add the
residual's gradient inside the norm's kernel, not save silu(gate) * up, and compute a loss over a sharded vocabulary.

Measured on an H200 with torch 2.11 (BENCHMARKS.md, docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from plait.errors import ConfigError, Problem
from plait.kernels.triton import has_kernels

Implementation = Literal["torch", "plait"]


class Operation(NamedTuple):
    """One row of the registry."""

    implementations: tuple[Implementation, ...]
    """The implementations that exist, in order of preference."""
    why: str
    """Why the first one is preferred."""
    capability: tuple[int, int] = (0, 0)
    """The CUDA compute capability that Plait's kernel needs."""
    excluded: tuple[torch.dtype, ...] = (torch.float64,)
    """Dtypes for which torch's implementation is used."""


_BOTH: tuple[Implementation, ...] = ("plait", "torch")

OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        # Layers of a model, used where strategy.kernels is auto and the model is not compiled.
        "rms_norm": Operation(
            _BOTH,
            "keeps its input and one number per row, and adds the residual's gradient while it writes its own. Alone "
            "it is not faster (with the addition, both passes 0.392 ms, torch 0.362); a model with these three "
            "operations is as fast as a compiled one, within 1 %, and takes 5 GiB less",
        ),
        "rotary": Operation(_BOTH, "queries and keys in one kernel, both passes: 0.639 ms, torch 1.655"),
        "swiglu": Operation(_BOTH, "both passes 0.693 ms, torch 0.917; the product is not kept for the backward pass"),
        # The loss.
        "cross_entropy": Operation(
            _BOTH,
            "in place of the logits, in chunks of 1 GiB, where the logits of 16,384 tokens x 128,256 words take 8.4 "
            "GB in fp32 and their gradient as much. torch's F.linear_cross_entropy exists from 2.13 on (Plait runs "
            "on 2.11), breaks the graph under torch.compile, and has neither a form for a head that is sharded over "
            "the vocabulary nor 8-bit backward products",
            excluded=(),
        ),
        "scaled": Operation(
            _BOTH,
            "a tensor times a number on the device, in another dtype: torch's runs at a third of the bandwidth",
            excluded=(),
        ),
        # Products in 8 bits.
        "fp8_cast": Operation(
            _BOTH,
            "scale, copy and transposed copy in two reads of the tensor: a Llama 1B step takes 205 ms instead of 251 "
            "in bf16. In torch operations the casts cost more than the products save",
            capability=(8, 9),
            excluded=(),
        ),
        "fp8_matmul": Operation(
            ("torch",),
            "torch._scaled_mm. F.scaled_mm is the same product through another operator (_scaled_mm_v2), which torch "
            "2.13's FlopCounterMode does not count: MFU and the plan's step time would miss all 8-bit products",
        ),
        # Optimizers.
        "adam": Operation(
            _BOTH,
            "bf16 gradients in, rounded weights out, all tensors in one launch: 4.429 ms, torch's fused AdamW and a "
            "pass that rounds 5.500",
            excluded=(),
        ),
        "adam8bit": Operation(
            _BOTH,
            "moments in a quarter of the memory; Llama 8B learns 10,693 tokens/s with it and 11,458 with AdamW. "
            "Blocks lie within rows, so the codes do not depend on the number of ranks",
            excluded=(),
        ),
        # Attention.
        "attention": Operation(
            ("torch",),
            "torch's choice of cuDNN on Hopper takes two thirds of FlashAttention's time; strategy.attention",
        ),
        # The decoder of one GPU: plait.kernels.decode.
        "decode": Operation(
            _BOTH,
            "five kernels per layer that overlap and prefetch weights: Llama 1B writes 6,466 tokens/s at batch 8 and "
            "67,310 at 128, transformers.generate 133 to 668 and 2,285 to 9,479",
        ),
        "record_tokens": Operation(_BOTH, "one kernel of the captured decode step instead of about a dozen"),
    }
)


def implementation(operation: str, tensor: Tensor) -> Implementation:
    """Return the implementation of an operation for a tensor; a fake tensor is treated like one on its device."""
    row = OPERATIONS[operation]
    has_own = "plait" in row.implementations and tensor.dtype not in row.excluded
    return "plait" if has_own and has_kernels(tensor, row.capability) else "torch"


def choose_attention(kernel: str, device: torch.device) -> None:
    """Restrict torch's SDPA to one kernel (`strategy.attention`), or to "math" where that kernel cannot run.

    The restriction holds for the whole process (it is torch's global setting), so recomputed activations come from the
    same kernel. `auto` leaves the choice to torch, which prefers cuDNN on Hopper and later, and FlashAttention before.
    Raise a `ConfigError` for any other choice on a device without CUDA.
    """
    if kernel == "auto":
        return
    if device.type != "cuda":
        raise ConfigError(
            Problem(
                "strategy.attention",
                f"{kernel!r} is a kernel for CUDA, and the device is {device.type}",
                "Leave it out.",
            )
        )
    cuda = torch.backends.cuda
    cuda.enable_cudnn_sdp(kernel == "cudnn")
    cuda.enable_flash_sdp(kernel == "flash")
    cuda.enable_mem_efficient_sdp(kernel == "efficient")
    cuda.enable_math_sdp(True)
