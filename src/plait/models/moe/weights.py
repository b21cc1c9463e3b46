"""Mixtral weights in the names of `transformers`.

On disk each expert's matrices are tensors of their own; here, and in the memory of `transformers`, they lie in
stacks. Folders in either form are read, the first is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.config import MoeConfig
from plait.errors import ModelError
from plait.models.common.exchange import Made, by_translation, same
from plait.models.common.weights import Put, stream_weights, weight_files
from plait.models.llama import weights as llama
from plait.models.moe.block import expert_dim

_STACKS = {"w1": "gate", "w3": "up", "w2": "down"}
"""Mixtral's names for the matrices of an expert, and ours."""
_ROUTER = re.compile(r"\.(?:block_sparse_moe|mlp)\.gate\.")
_ONE = re.compile(r"\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(w[123])\.weight$")
_STACKED = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj$")
_PIECE = re.compile(r"^(.*\.experts\.(?:gate|up|down))\.(\d+)$")

UNUSED = llama.UNUSED
"""Stored tensors, in the names of `transformers`, that a `Moe` computes itself."""


def load_pretrained(model: nn.Module, path: str | Path, put: Put) -> tuple[str, ...]:
    """Stream a `transformers` Mixtral folder into a `Moe` of the same sizes; see `stream_weights`.

    Of the experts, at most the stacks of one layer are in memory at a time.
    """
    tied = [] if "head.weight" in model.state_dict() else [r"^head\.weight$"]
    if not any(_STACKED.search(name) for name in weight_files(path)):
        model, put = _Unstacked(model), _Stacking(model, put)
    return stream_weights(
        model, path, put, translate=from_transformers, may_miss=[r"\.router\.bias$"], may_skip=[*UNUSED, *tied]
    )


def from_transformers(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """What one tensor of `MixtralForCausalLM` is here.

    One expert's matrix is a slice of ours, under our name with the expert's number behind: `….experts.gate.3`.
    """
    ((name, tensor),) = llama.from_transformers(_ROUTER.sub(".ffn.router.", name), tensor)
    if one := _ONE.search(name):
        expert, matrix = one.groups()
        yield f"{name[: one.start()]}.ffn.experts.{_STACKS[matrix]}.{expert}", tensor
    elif stacked := _STACKED.search(name):
        stem = f"{name[: stacked.start()]}.ffn.experts."
        if stacked[1] == "down":
            yield stem + "down", tensor
        else:
            yield from zip((stem + "gate", stem + "up"), tensor.chunk(2, 1), strict=True)
    else:
        yield name, tensor


def made_from_transformers(shapes: Mapping[str, torch.Size]) -> dict[str, Made]:
    """Our tensors, each made of stored ones with these names and shapes."""
    made: dict[str, Made] = {}
    stacks: dict[str, dict[int, Made]] = {}
    for name, part in by_translation(from_transformers, shapes).items():
        if piece := _PIECE.match(name):
            stacks.setdefault(piece[1], {})[int(piece[2])] = part
        else:
            made[name] = part
    for name, pieces in stacks.items():
        made[name] = Made(tuple(part for expert in sorted(pieces) for part in pieces[expert].parts), _stack)
    return made


def to_transformers(config: MoeConfig) -> dict[str, Made]:
    """The tensors of `MixtralForCausalLM`, each made of ours; `ModelError` where a Mixtral computes otherwise."""
    _refuse_what_mixtral_lacks(config)
    made = {name: part for name, part in llama.to_transformers(config).items() if ".mlp." not in name}
    for layer in range(config.layers):
        theirs, ours = f"model.layers.{layer}.block_sparse_moe", f"blocks.{layer}.ffn"
        made[f"{theirs}.gate.weight"] = Made((f"{ours}.router.weight",), same)
        for expert in range(config.experts):
            for matrix, stack in _STACKS.items():
                name = f"{theirs}.experts.{expert}.{matrix}.weight"
                made[name] = Made((f"{ours}.experts.{stack}",), partial(_one, expert))
    return made


def describe(config: MoeConfig) -> dict[str, Any]:
    """The `config.json` with which `transformers` builds the same model."""
    _refuse_what_mixtral_lacks(config)
    dense = llama.describe(config)
    for key in ("attention_bias", "mlp_bias"):
        del dense[key]
    return {
        **dense,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": expert_dim(config),
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "sliding_window": None,
        "router_aux_loss_coef": config.balance_loss,
    }


def from_description(found: Mapping[str, Any]) -> MoeConfig:
    """Our configuration for a `config.json` of a Mixtral; `ModelError` where a `Moe` computes otherwise."""
    wanted = {"model_type": "mixtral", "sliding_window": None}
    for key, needed in wanted.items():
        if found.get(key) != needed:
            raise ModelError(
                f"config.json has {key} {found.get(key)!r}, and Plait's moe knows {needed!r} only; "
                "use `model.type: hf` for it"
            )
    dense = llama.from_description({**found, "model_type": "llama"}).model_dump(exclude={"type"})
    return MoeConfig(**dense, experts=found["num_local_experts"], top_k=found["num_experts_per_tok"])


def _refuse_what_mixtral_lacks(config: MoeConfig) -> None:
    mixtral = {"moe_every": 1, "shared_experts": 0, "score": "softmax", "normalize": True, "bias_rate": 0.0}
    for key, needed in mixtral.items():
        if getattr(config, key) != needed:
            raise ModelError(
                f"model.{key}={getattr(config, key)} has no counterpart in the Mixtral of transformers, which knows "
                f"{needed} only; write a plain state dict with `--to torch`, or a checkpoint with `--to plait`"
            )


def _stack(*experts: Tensor) -> Tensor:
    return torch.stack(experts)


def _one(expert: int, stack: Tensor) -> Tensor:
    return stack[expert]


class _Unstacked(nn.Module):
    """A model's tensors as a folder has them: each expert's matrices under names of their own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if _PIECE.match(f"{name}.0"):
                slice_ = torch.empty(tensor.shape[1:], device="meta")
                self._tensors |= {f"{name}.{expert}": slice_.clone() for expert in range(tensor.shape[0])}
            else:
                self._tensors[name] = tensor

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """The names and shapes to be filled."""
        return self._tensors


class _Stacking:
    """Hands on whole tensors, and stacks as soon as they are complete."""

    def __init__(self, model: nn.Module, put: Put) -> None:
        self._experts = {name: t.shape[0] for name, t in model.state_dict().items() if _PIECE.match(f"{name}.0")}
        self._put = put
        self._pieces: dict[str, dict[int, Tensor]] = {}

    def __call__(self, name: str, tensor: Tensor) -> None:
        piece = _PIECE.match(name)
        if piece is None:
            self._put(name, tensor)
            return
        pieces = self._pieces.setdefault(piece[1], {})
        pieces[int(piece[2])] = tensor
        if len(pieces) == self._experts[piece[1]]:
            del self._pieces[piece[1]]
            self._put(piece[1], torch.stack([pieces[expert] for expert in range(len(pieces))]))
