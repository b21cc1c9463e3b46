"""The same for models of `transformers`: norms, gates and rotations of Llama, Mistral and Qwen, exchanged in place.

A module's class is extended, as `models.hf.model` does it with the whole model. Rotations are a function that the
attention of `transformers` finds among the names of its file; a copy of its `forward` finds another one there, so that
nobody else's models change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

from torch import Tensor, nn

from plait.ops.rms_norm import rms_norm
from plait.ops.rotate import rotate
from plait.ops.swiglu import swiglu

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROTATION = "apply_rotary_pos_emb"


class _Norm(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        own: Any = self
        return rms_norm(hidden_states, own.weight, own.variance_epsilon)


class _Gated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        own: Any = self
        return own.down_proj(swiglu(own.gate_proj(x), own.up_proj(x)))  # type: ignore[no-any-return]


_KINDS: Mapping[str, str] = MappingProxyType({"RMSNorm": "norms", "MLP": "gates", "Attention": "rotations"})


def fuse_transformers(model: nn.Module) -> Counter[str]:
    """Exchange what is recognised; returns how many of each kind."""
    counts: Counter[str] = Counter()
    made: dict[type[nn.Module], type[nn.Module] | None] = {}
    for module in model.modules():
        original = type(module)
        word = _word(original)
        if word is None or (word == "MLP" and not _is_silu(module)):
            continue
        if original not in made:
            made[original] = _extended(original, word)
        fused = made[original]
        if fused is not None:
            module.__class__ = fused
            counts[_KINDS[word]] += 1
    return counts


def _word(kind: type[nn.Module]) -> str | None:
    """What a class of a known family is, by its name."""
    parts = kind.__module__.split(".")
    if parts[:2] != ["transformers", "models"] or parts[2] not in _FAMILIES:
        return None
    return next((word for word in _KINDS if kind.__name__.lower() == f"{parts[2]}{word}".lower()), None)


def _is_silu(module: Any) -> bool:
    return type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _extended(original: type[nn.Module], word: str) -> type[nn.Module] | None:
    members: dict[str, object] = {"__module__": original.__module__}
    if word == "Attention":
        forward = original.forward
        if not isinstance(forward, FunctionType) or forward.__closure__ or _ROTATION not in forward.__code__.co_names:
            return None  # another release of `transformers`, in which it goes about it differently
        members["forward"] = _with_rotation(forward)
        return type(original.__name__, (original,), members)
    return type(original.__name__, ({"RMSNorm": _Norm, "MLP": _Gated}[word], original), members)


def _with_rotation(forward: FunctionType) -> FunctionType:
    """A copy of a function that finds another rotation under the usual name."""
    names = {**forward.__globals__, _ROTATION: _rotation(forward.__globals__[_ROTATION])}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _rotation(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def together(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim != 1 or cos.ndim != 3 or cos.shape[-1] != q.shape[-1]:
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return rotate(q, k, cos, sin)

    return together
