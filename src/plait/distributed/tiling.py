"""Sequence tiling (tiled MLP, as in ALST): token-wise layers, computed for some tokens (a *tile*) at a time.

[Note: tiles of tokens] The hidden activations of a feed-forward layer are several times as wide as the model, so in
long sequences they are the largest that a block saves. With tiles, they never exist for all tokens at once: the forward
pass saves only each tile's input, and the backward pass recomputes one tile at a time. The results are those of the
untiled layer; the gradients of its weights are summed over tiles, in the dtype of the gradients.
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
    """Make the layers that `config` names compute in tiles; return their names.

    Their `forward` is replaced, so no parameter changes its name. A pattern that matches nothing raises a
    `ConfigError`.
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
    # Of nested modules only the outermost: inner ones would be tiled twice.
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
        # Layers may flatten rows and tokens with `view`, which needs a contiguous tensor. The copy is made inside of
        # the checkpointed function, so that checkpointing saves `piece`, a view of `x`, and not the copy.
        return forward(piece.contiguous())

    module.forward = tiled


@on_fake_tensors(lambda x, module, forward, name, tokens: False)
def _check(x: Tensor, module: nn.Module, forward: Any, name: str, tokens: int) -> bool:
    """Raise a `ModelError` if a token's result depends on other tokens; called before the first tiled call.

    Return True: it was checked. The stand-in for fake tensors, which have no values to compare, returns False.
    """
    training = {submodule: submodule.training for submodule in module.modules()}
    module.eval()  # dropout depends on the number of tokens
    try:
        # Without dispatch modes: selective checkpointing counts the operations of the forward pass, and the
        # recomputation does not run this check.
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
