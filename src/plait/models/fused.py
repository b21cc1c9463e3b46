"""Fused norms, feed-forwards and attentions, which replace those of a model in place.

They are for models that are not compiled: `torch.compile` fuses the same operations itself. To replace a module, its
class is changed, so parameters keep their names. Modules of other classes are not changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, cast

from torch import Tensor, nn

from plait.errors import ModelError
from plait.kernels import MULTIPLE, add_rms_norm, apply_rotary, rms_norm, rms_norm_and_input
from plait.models.common.attention import Attention, Rotary, Shared
from plait.models.common.losses import Fp8Head, LMHead
from plait.models.hf import CausalLM, fuse_transformers, head_of
from plait.models.llama import LlamaBlock, SwiGLU
from plait.precision import apply_linears, feed_forward

_EPS = 1.1920929e-07
"""torch's default where an RMSNorm has no `eps`: the machine epsilon of fp32."""


class FusedRMSNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its input; given two tensors, it returns their sum and the norm of the sum."""

    def forward(  # type: ignore[override]
        self, x: Tensor, added: Tensor | None = None, *, with_input: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm over the last dim; with `added`, the sum and its norm; `with_input`, the input and its norm.

        With `with_input`, the kernel of the backward pass also adds the gradient of the returned input.
        """
        eps = _EPS if self.eps is None else self.eps
        if added is not None:
            return add_rms_norm(x, added, self.weight, eps)
        return rms_norm_and_input(x, self.weight, eps) if with_input else rms_norm(x, self.weight, eps)


class FusedSwiGLU(SwiGLU):
    """A gated feed-forward as one autograd function, which does not save silu(gate) * up for the backward pass."""

    together: ClassVar[tuple[tuple[str, ...], ...]] = (("gate", "up"), ("down",))
    """Layers that are multiplied together; see `kernels.bypassed_layers`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward of each token."""
        return feed_forward(x, self.gate, self.up, self.down)


class FusedAttention(Attention):
    """An attention that projects its input in one autograd function, and rotates queries and keys in one kernel."""

    together: ClassVar[tuple[tuple[str, ...], ...]] = (("q", "k", "v"),)
    """Layers that are multiplied together; see `kernels.bypassed_layers`."""

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Return queries, keys and values, (batch, tokens, features) each."""
        return apply_linears(x, (self.q, self.k, self.v))


class FusedLlamaBlock(LlamaBlock):
    """A layer that adds to the residual stream and normalizes the sum in one kernel, in forward and backward pass."""

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """Apply the layer to the residual stream (batch, tokens, dim), and return the new one."""
        x, normed = self.attention_norm(x, with_input=True)
        x, normed = self.ffn_norm(x, self.attention(normed, shared))
        return x + self.ffn(normed)  # type: ignore[no-any-return]


def fuse(model: nn.Module) -> dict[str, int]:
    """Replace the modules of a model that have fused forms; return the number of replaced modules of each kind."""
    counts: Counter[str] = Counter()
    for module in model.modules():
        cls = type(module)
        if cls is nn.RMSNorm and _norms_last_dim(cast(nn.RMSNorm, module)):
            module.__class__ = FusedRMSNorm
            counts["norms"] += 1
        elif cls is SwiGLU:
            module.__class__ = FusedSwiGLU
            counts["gates"] += 1
        elif cls is Attention:
            module.__class__ = FusedAttention
            cast(FusedAttention, module).rotate = rotate_together
            counts["attentions"] += 1
    for module in model.modules():
        if type(module) is LlamaBlock and type(module.attention_norm) is type(module.ffn_norm) is FusedRMSNorm:
            module.__class__ = FusedLlamaBlock
    return dict(counts + fuse_transformers(model))


def _norms_last_dim(norm: nn.RMSNorm) -> bool:
    return norm.elementwise_affine and len(norm.normalized_shape) == 1


def rotate_together(rotary: Rotary, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rotated queries and keys, as `rotate_both` does, by one kernel."""
    return apply_rotary(q, k, rotary.cos.squeeze(1), rotary.sin.squeeze(1))


def use_fp8_head(model: nn.Module, *, emulated: bool, traced: bool = False) -> None:
    """Set the head of `model`, Plait's own or a `transformers` decoder's, to compute its gradients in 8 bits.

    `traced`: the model will be compiled as a whole. Raise a `ModelError` if the head cannot compute the loss (as that
    of a `transformers` model that is compiled as a whole), or its number of features is not a multiple of 16.
    """
    heads = [module for module in model.modules() if isinstance(module, LMHead | CausalLM)]
    if not heads:
        raise _refusal(model, "has no head that goes from hidden states straight to the loss")
    for module in heads:
        if isinstance(module, LMHead):
            features = module.features
        else:
            head = head_of(module)
            if head is None or not module.tiles_loss:
                raise _refusal(model, "does more with its logits than hand them on")
            if traced:
                raise _refusal(
                    model, "makes all logits where it is compiled as a whole (strategy.compile.scope: model)"
                )
            features = head.in_features
        if features % MULTIPLE:
            raise _refusal(model, f"has {features} features, and 8-bit products take multiples of {MULTIPLE}")
        module.fp8_head = Fp8Head(emulated)


def _refusal(model: nn.Module, reason: str) -> ModelError:
    return ModelError(
        f"precision.fp8.head: {type(model).__name__} {reason}. It is for Plait's language models and for decoders of "
        "`transformers`; leave it out"
    )
