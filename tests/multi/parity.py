"""The same steps under any strategy: what parity tests compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.config import parse_sections
from plait.data import MicroBatch
from plait.distributed import World, open_world
from plait.engine import Preparation, prepare_native
from plait.testing import full_tensors

__all__ = ["GENTLE", "MODEL", "SEQ", "STEPS", "VOCAB", "Trace", "assert_same", "errors_of", "run_steps"]
__all__ += ["full_tensors", "token_batches"]

STEPS = 5
GENTLE = {"type": "AdamW", "lr": 1e-2, "eps": 0.1}
"""Such an `eps` makes steps nearly proportional to gradients. With a small one a gradient near zero that rounding turns
round makes a whole step the other way, and weights drift apart. Of 61 seeds two were then more than 1e-5 apart in fp32
merely because micro-batches came in another order; now the worst is 6e-7. In bf16 some batches answered with gradients
7 % apart."""
VOCAB, SEQ = 61, 12
MODEL = {"type": "llama", "vocab_size": VOCAB, "dim": 24, "layers": 3, "heads": 4, "kv_heads": 2, "seq_len": SEQ}


@dataclass
class Trace:
    """What a run did, as whole tensors on the host."""

    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    tensors: dict[str, Tensor]


def token_batches(seed: int, micro_batches: int) -> list[list[dict[str, Tensor]]]:
    """For each step, micro-batches with very different numbers of targets."""
    generator = torch.Generator().manual_seed(seed)
    steps = []
    for _ in range(STEPS):
        step = []
        for _ in range(micro_batches):
            ids = torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator)
            labels = ids[:, 1:].clone()
            masked = torch.rand(labels.shape, generator=generator) < torch.rand((), generator=generator) * 0.9
            labels[masked] = -100
            step.append({"input_ids": ids[:, :-1], "labels": labels})
        steps.append(step)
    return steps


def run_steps(
    rank: int,
    size: int,
    sections: dict[str, Any],
    steps: list[list[Any]],
    model: Any = None,
    loss_fn: Any = None,
    world: World | None = None,
) -> Trace:
    """Train on this rank's share: rank r takes micro-batches r, r + size, …; `model` is a function that makes one."""
    sections = {"seed": 3, "optim": GENTLE, "model": MODEL, **sections}
    if model is not None:
        sections.pop("model")
    config = parse_sections(**sections).config
    engine = prepare_native(Preparation(config, world or open_world(config), model=model, loss_function=loss_fn))
    trace = Trace([], [], [], {})
    for step in steps:
        mine = step[rank::size]
        result = engine.train_step([b if isinstance(b, MicroBatch) else MicroBatch(b, 1) for b in mine])
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        trace.skipped.append(result.skipped)
    trace.tensors = full_tensors(engine.state_tensors())
    return trace


def assert_same(found: Trace, expected: Trace, *, tolerance: float, noise: str = "", by_norm: bool = False) -> None:
    """Losses, norms, parameters and optimizer state agree, each relative to its own largest value, or to its norm.

    `noise` is part of the names of parameters whose true gradient is zero: of those there is nothing to compare.
    """
    errors = errors_of(found, expected, noise=noise, by_norm=by_norm)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= tolerance, f"{worst} differs by {errors[worst]:.2e} of its largest value"


def errors_of(found: Trace, expected: Trace, *, noise: str = "", by_norm: bool = False) -> dict[str, float]:
    """How far each number lies from what was expected; see `assert_same`."""
    assert found.skipped == expected.skipped
    assert found.tensors.keys() == expected.tensors.keys()
    errors = {
        "loss": _error(torch.tensor(found.losses), torch.tensor(expected.losses)),
        "grad_norm": _error(torch.tensor(found.norms), torch.tensor(expected.norms)),
        **{
            name: _error(found.tensors[name], tensor, by_norm=by_norm)
            for name, tensor in expected.tensors.items()
            if not noise or noise not in name
        },
    }
    # A square is twice as far off as what was squared.
    return {name: error / 2 if name.endswith("exp_avg_sq") else error for name, error in errors.items()}


def _error(found: Tensor, expected: Tensor, *, by_norm: bool = False) -> float:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    finite = expected.isfinite()
    assert torch.equal(finite, found.isfinite())
    if by_norm:
        return float((found - expected)[finite].norm() / expected[finite].norm().clamp_min(1e-12))
    scale = float(expected[finite].abs().max()) if finite.any() else 0.0
    difference = float((found - expected)[finite].abs().max()) if finite.any() else 0.0
    return difference / scale if scale else difference
