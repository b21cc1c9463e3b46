"""Check before training, on a few small parameters, whether a user-provided optimizer is correct on several ranks.

[Note: parameters one by one] With full parameters on their owners, and in pipelines, each rank updates only some of the
parameters. The result equals that of one process only if the update of a parameter depends on no other parameter: a
learning rate that is estimated from all of them, or a limit on the norm of all updates, would differ between ranks. So
the optimizer updates small parameters together, then each alone, and the results must be equal: the weights, and the
values in its groups. An optimizer that draws random numbers would draw different ones on each rank; it is found by
running the same steps twice.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.errors import ConfigError, Problem
from plait.optim.state import flatten

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
"""A function that builds another optimizer of the same class over given parameter groups."""

_STEPS = 4
_SIDES = (4, 3, 2, 2)
"""The maximal size of each dim of a small parameter."""


@dataclass(frozen=True, slots=True)
class OptimizerNeeds:
    """Which properties of the optimizer a run depends on."""

    one_by_one: bool
    """Ranks update different parameters, so the update of one must not depend on others."""
    by_element: bool
    """Ranks update different shards of parameters, so the optimizer must be elementwise."""
    alike: bool
    """Several ranks update the same parameters, so the update must not be random."""
    saved: bool
    """Checkpoints are written, so its state must be storable."""


def examine_optimizer(optimizer: Optimizer, make: OptimizerFactory, needs: OptimizerNeeds) -> None:
    """Raise `ConfigError` if an optimizer does not have the properties in `needs`; `make` builds others like it."""
    name = type(optimizer).__name__
    spread = needs.one_by_one or needs.by_element
    if not (spread or needs.alike or needs.saved):
        return
    try:
        with torch.random.fork_rng(devices=[]):
            trial = _Trial(make, _small_groups(optimizer))
            reason, remedy = trial.refuse(name, needs)
    except Exception as error:  # the user's code may raise anything on small parameters
        if not spread:
            return  # no property that must be checked: if it cannot train, the first step raises
        reason = (
            f"{name} could not be tried on small parameters ({type(error).__name__}: {error}), and ranks that share "
            "parameters out must know that it treats them one by one"
        )
        remedy = _WHOLE
    if reason:
        raise ConfigError(Problem("optim.type", reason, remedy))


_WHOLE = "Train with strategy.zero: 0 and without tensor and pipeline ranks, or use another optimizer."


class _Trial:
    """Steps of one optimizer class on some groups of small parameters."""

    def __init__(self, make: OptimizerFactory, groups: list[tuple[dict[str, Any], list[Tensor]]]) -> None:
        self._make = make
        self._groups = groups
        """The options and the initial values of each group."""
        generator = torch.Generator().manual_seed(1)
        self._grads = [
            [[torch.randn(tensor.shape, generator=generator).to(tensor) for tensor in tensors] for _, tensors in groups]
            for _ in range(_STEPS)
        ]

    def refuse(self, name: str, needs: OptimizerNeeds) -> tuple[str, str]:
        """Return the reason why the optimizer cannot be used, and the remedy; two empty strings if it can."""
        positions = [(group, index) for group, (_, tensors) in enumerate(self._groups) for index in range(len(tensors))]
        torch.manual_seed(1)
        together, optimizer = self._run(positions)
        if needs.saved and (lost := _unstorable(optimizer)):
            return (
                f"{name} keeps {lost}, which a checkpoint cannot hold",
                "Use another optimizer, or save nothing: `checkpoint.last: false`, without `every` and `best`.",
            )
        spread = needs.one_by_one or needs.by_element
        torch.manual_seed(2)
        if (spread or needs.alike) and not _same(together, self._run(positions)[0]):
            return f"{name} draws random numbers, which would differ between ranks", "Train on one process."
        if not spread:
            return "", ""
        for position in positions:
            alone, _ = self._run([position])
            if not _same({key: together[key] for key in alone}, alone):
                reason = f"{name}'s update of a parameter depends on other parameters: it differs when updated alone"
                return reason, _WHOLE
        if needs.by_element and not self._is_elementwise(together):
            reason = f"{name} is not elementwise: a shard is updated otherwise than as part of the full parameter"
            return reason, "Leave out `optim.elementwise`: it gets full parameters then."
        return "", ""

    def _run(
        self, positions: Sequence[tuple[int, int]], select: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> tuple[dict[Any, Any], Optimizer]:
        """Run a few steps on some of the parameters, or on the shards that `select` returns.

        Return the resulting weights and group values, and the optimizer.
        """
        params = {
            (group, index): nn.Parameter(select(self._groups[group][1][index]).clone()) for group, index in positions
        }
        groups = [
            {
                "params": [param for (of_group, _), param in params.items() if of_group == group],
                **copy.deepcopy(options),
            }
            for group, (options, _) in enumerate(self._groups)
        ]
        optimizer: Any = self._make(groups)
        if has_two_modes(optimizer):
            optimizer.train()
        for grads in self._grads:
            for (group, index), param in params.items():
                param.grad = select(grads[group][index]).clone()
            optimizer.step()
        results: dict[Any, Any] = {position: param.detach() for position, param in params.items()}
        for number, options in enumerate(optimizer.param_groups):
            if options["params"]:
                results[number] = {key: _plain(value) for key, value in options.items() if key not in _NAMES}
        return results, optimizer

    def _is_elementwise(self, together: Mapping[Any, Any]) -> bool:
        for position, whole in together.items():
            if isinstance(position, tuple) and whole.ndim and len(whole) > 1:
                halves = [self._run([position], half)[0][position] for half in (_first_half, _second_half)]
                if not _same({position: whole}, {position: torch.cat(halves)}):
                    return False
        return True


def _first_half(tensor: Tensor) -> Tensor:
    return tensor[: len(tensor) // 2]


def _second_half(tensor: Tensor) -> Tensor:
    return tensor[len(tensor) // 2 :]


_NAMES = ("params", "param_names")


def _small_groups(optimizer: Optimizer) -> list[tuple[dict[str, Any], list[Tensor]]]:
    """Return for each group its options, and one small tensor per number of dimensions in it."""
    generator = torch.Generator().manual_seed(0)

    def small_like(tensor: Tensor) -> Tensor:
        sides = [min(side, _SIDES[min(dim, 3)]) for dim, side in enumerate(tensor.shape)]
        return torch.randn(sides, generator=generator).to(tensor.device, tensor.dtype)

    groups = []
    for group in optimizer.param_groups:
        by_ndim = {tensor.ndim: tensor for tensor in group["params"] if tensor.numel()}
        options = {key: value for key, value in group.items() if key not in (*_NAMES, "initial_lr")}
        groups.append((options, [small_like(tensor) for tensor in by_ndim.values()]))
    filled = [tensors for _, tensors in groups if tensors]
    if len(filled) == 1 and len(filled[0]) == 1:  # a second parameter, to find a dependence on other parameters
        filled[0].append(filled[0][0] * 2 + 1)
    return groups


def clone_factory(optimizer: Optimizer) -> OptimizerFactory:
    """Return a function that builds copies of an optimizer object, whose constructor arguments are not known."""

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        made: Optimizer = object.__new__(type(optimizer))
        for key, value in vars(optimizer).items():
            if key not in ("param_groups", "state", "step"):
                if isinstance(value, Optimizer | Tensor):
                    raise TypeError(f"its attribute {key!r} is a {type(value).__name__}")
                made.__dict__[key] = copy.deepcopy(value)
        made.param_groups = groups
        made.state = type(optimizer.state)(dict)
        return made

    return make


def has_two_modes(optimizer: Any) -> bool:
    """Whether an optimizer evaluates with other weights than it trains, by `eval()` and `train()`."""
    return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))


def _unstorable(optimizer: Optimizer) -> str | None:
    """Return which state a checkpoint cannot store; None if it can store all."""
    for key, state in optimizer.state.items():
        if not isinstance(key, Tensor):
            return f"a state of its own, {key!r}, besides those of parameters"
        for name, value in state.items():
            try:
                flatten(name, value)
            except TypeError as error:
                return str(error)
    return None


def _plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


def _same(expected: Any, actual: Any) -> bool:
    if isinstance(expected, Tensor):
        return isinstance(actual, Tensor) and torch.allclose(expected.float(), actual.float(), rtol=1e-5, atol=1e-8)
    if isinstance(expected, Mapping):
        return expected.keys() == actual.keys() and all(_same(value, actual[key]) for key, value in expected.items())
    if isinstance(expected, float):
        return math.isclose(expected, actual, rel_tol=1e-6) or expected == actual
    try:
        return bool(expected == actual)
    except Exception:  # objects that cannot be compared are treated as equal
        return True
