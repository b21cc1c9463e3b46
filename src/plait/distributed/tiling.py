"""Sequence tiling (tiled MLP, as in ALST): layers that work on each token alone, computed for some tokens at a time.

[Note: tiles of tokens] Between its two linear maps a feed-forward layer is several times as wide as the model, so in
long sequences its hidden activations are the largest that a block saves. In tiles they never exist all at once: the
forward pass keeps only each tile's input, and the backward pass recomputes one tile at a time. The results are those of
the untiled layer; the gradients of its weights are sums over tiles, added in their own dtype.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.config import TilesConfig
from plait.errors import ConfigError, ModelError, Problem
from plait.fake_tensors import on_fake_tensors
from plait.torch_internals import disable_current_modes

_PATH = "strategy.tiles.names"


def tile_sequence(model: nn.Module, config: TilesConfig) -> list[str]:
    """Compute the layers that `config` names in tiles; returns their names.

    Their `forward` is replaced, so no parameter changes its name.
    """
    chosen: dict[str, nn.Module] = {}
    problems = []
    for pattern in config.names:
        matches = {name: module for name, module in model.named_modules() if name and fnmatchcase(name, pattern)}
        if not matches:
            names = [name for name, _ in model.named_modules() if name][:20]
            problems.append(Problem(_PATH, f"{pattern!r} matches no module", f"There are: {', '.join(names)}, …"))
        chosen |= matches
    if problems:
        raise ConfigError(problems)
    # Of nested modules the outermost: the others would be tiled twice.
    outermost = {name: m for name, m in chosen.items() if not any(name.startswith(f"{other}.") for other in chosen)}
    for name, module in outermost.items():
        _tile(module, name, config.tokens)
    return list(outermost)


def _tile(module: nn.Module, name: str, tokens: int) -> None:
    forward = module.forward
    unchecked = [True]

    @wraps(forward)
    def tiled(x: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not isinstance(x, Tensor) or x.ndim < 2:
            raise _unfit(name, "takes more than one tensor of tokens")
        if x.shape[-2] <= tokens:
            return forward(x)
        if unchecked and not torch.compiler.is_compiling() and _check(x, module, forward, name, tokens):
            unchecked.clear()
        pieces = torch.split(x, tokens, dim=-2)
        if not torch.is_grad_enabled():
            return torch.cat([alone(piece) for piece in pieces], dim=-2)
        return torch.cat([checkpoint(alone, piece, use_reentrant=False) for piece in pieces], dim=-2)

    def alone(piece: Tensor) -> Any:
        # Layers may join rows and tokens with `view`. Copied here, so that what is saved is a view of `x`.
        return forward(piece.contiguous())

    module.forward = tiled


@on_fake_tensors(lambda x, module, forward, name, tokens: False)
def _check(x: Tensor, module: nn.Module, forward: Any, name: str, tokens: int) -> bool:
    """Check, at the first call, that a token's result does not depend on other tokens; whether that was possible."""
    training = {submodule: submodule.training for submodule in module.modules()}
    module.eval()  # dropout depends on the number of tokens
    try:
        # Selective checkpointing counts the operations of the forward pass, and the backward pass does not repeat this.
        with torch.no_grad(), disable_current_modes():
            alone, among = forward(x[..., :tokens, :].contiguous()), forward(x)
    finally:
        for submodule, mode in training.items():
            submodule.training = mode
    if not isinstance(alone, Tensor) or alone.shape[:-1] != (*x.shape[:-2], tokens):
        raise _unfit(name, "does not return one row for each token")
    other = among[..., :tokens, :]
    near = 64 * torch.finfo(alone.dtype).eps * float(other.abs().max())
    if not torch.allclose(alone, other, rtol=0.0, atol=near, equal_nan=True):
        raise _unfit(name, "depends on other tokens too")
    return True


def _unfit(name: str, what: str) -> ModelError:
    return ModelError(
        f"strategy.tiles names {name!r}, which {what}: only layers that work on each token alone, such as feed-forward "
        "layers, can be cut into tiles"
    )
