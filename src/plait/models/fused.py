"""Norms, gates and rotations of a model, exchanged in place for forms that pass over memory once.

For models that are not compiled: a compiler fuses these by itself, and better. A module changes its class, so no
parameter changes its name. What is not recognised stays as it is.
"""

from __future__ import annotations

from collections import Counter
from typing import cast

from torch import Tensor, nn

from plait.models.common.attention import Attention, Shared
from plait.models.common.rope import Rotary
from plait.models.hf.fused import fuse_transformers
from plait.models.llama.block import LlamaBlock, SwiGLU
from plait.ops.rms_norm import add_rms_norm, rms_norm
from plait.ops.rotate import rotate
from plait.ops.swiglu import swiglu

_EPS = 1.1920929e-07
"""What torch takes where an RMSNorm has no `eps`: the smallest step of fp32."""


class FusedRMSNorm(nn.RMSNorm):
    """RMSNorm in the format of its input; given two tensors, their sum and its norm."""

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """Works on the last dim."""
        eps = _EPS if self.eps is None else self.eps
        return rms_norm(x, self.weight, eps) if added is None else add_rms_norm(x, added, self.weight, eps)


class FusedSwiGLU(SwiGLU):
    """A gated feed-forward whose middle is one operation."""

    def forward(self, x: Tensor) -> Tensor:
        """Works on each token alone."""
        return self.down(swiglu(self.gate(x), self.up(x)))  # type: ignore[no-any-return]


class FusedLlamaBlock(LlamaBlock):
    """A layer that adds to the residual stream and norms it in one operation."""

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """One step along the residual stream (batch, tokens, dim)."""
        x, normed = self.ffn_norm(x, self.attention(self.attention_norm(x), shared))
        return x + self.ffn(normed)  # type: ignore[no-any-return]


def fuse(model: nn.Module) -> dict[str, int]:
    """Exchange what is recognised; returns how many of each kind."""
    counts: Counter[str] = Counter()
    for module in model.modules():
        kind = type(module)
        if kind is nn.RMSNorm and _along_one_dim(cast(nn.RMSNorm, module)):
            module.__class__ = FusedRMSNorm
            counts["norms"] += 1
        elif kind is SwiGLU:
            module.__class__ = FusedSwiGLU
            counts["gates"] += 1
        elif kind is Attention:
            cast(Attention, module).rotate = rotate_together
            counts["rotations"] += 1
    for module in model.modules():
        if type(module) is LlamaBlock and type(module.ffn_norm) is FusedRMSNorm:
            module.__class__ = FusedLlamaBlock
    return dict(counts + fuse_transformers(model))


def _along_one_dim(norm: nn.RMSNorm) -> bool:
    return norm.elementwise_affine and len(norm.normalized_shape) == 1


def rotate_together(rotary: Rotary, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of `rope.rotate_both` in one operation."""
    return rotate(q, k, rotary.cos.squeeze(1), rotary.sin.squeeze(1))
