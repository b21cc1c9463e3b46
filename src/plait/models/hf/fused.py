"""The same for models of `transformers`: norms, gates and rotations of Llama, Mistral and Qwen, exchanged in place.

A module's class is extended, as `models.hf.model` does it with the whole model. Rotations are a function that the
attention of `transformers` finds among the names of its file; a copy of its `forward` finds another one there, so that
nobody else's models change. That copy is called with a stand-in for the module, whose projections are there already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial, wraps
from types import FunctionType, MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn

from plait.ops import rms_norm, rotate
from plait.precision import feed_forward, go_together, through_all

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROTATION = "apply_rotary_pos_emb"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class _Norm(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        own: Any = self
        return rms_norm(hidden_states, own.weight, own.variance_epsilon)


class _Gated(nn.Module):
    together: ClassVar[tuple[tuple[str, ...], ...]] = (("gate_proj", "up_proj"), ("down_proj",))

    def forward(self, x: Tensor) -> Tensor:
        own: Any = self
        return feed_forward(x, own.gate_proj, own.up_proj, own.down_proj)


class _Projected:
    """Stands for an attention during one call: what its projections answer is known, all else is the module's."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self._module = module
        # Each is let go of when it is asked for.
        known = dict(
            zip(_PROJECTIONS, through_all(x, [module.get_submodule(name) for name in _PROJECTIONS]), strict=True)
        )
        self.q_proj, self.k_proj, self.v_proj = (partial(_answer, known, name) for name in _PROJECTIONS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _answer(known: dict[str, Tensor], name: str, _: Tensor) -> Tensor:
    return known.pop(name)


_KINDS: Mapping[str, str] = MappingProxyType({"RMSNorm": "norms", "MLP": "gates", "Attention": "attentions"})


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
        members["forward"] = copy = _with_rotation(forward)
        if set(_PROJECTIONS) <= set(forward.__code__.co_names) and forward.__code__.co_varnames[1] == "hidden_states":
            members |= {"forward": _with_projections(copy), "together": (_PROJECTIONS,)}
        return type(original.__name__, (original,), members)
    return type(original.__name__, ({"RMSNorm": _Norm, "MLP": _Gated}[word], original), members)


def _with_rotation(forward: FunctionType) -> FunctionType:
    """A copy of a function that finds another rotation under the usual name."""
    names = {**forward.__globals__, _ROTATION: _rotation(forward.__globals__[_ROTATION])}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _with_projections(forward: FunctionType) -> Callable[..., Any]:
    """A forward that goes through all projections at once, where they go together."""

    @wraps(forward)
    def together(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        at_once = go_together([self.get_submodule(name) for name in _PROJECTIONS])
        return forward(_Projected(self, hidden_states) if at_once else self, hidden_states, *args, **kwargs)

    return together


def _rotation(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def together(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim != 1 or cos.ndim != 3 or cos.shape[-1] != q.shape[-1]:
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return rotate(q, k, cos, sin)

    return together
