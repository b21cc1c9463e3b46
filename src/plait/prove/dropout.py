"""Dropout in a proof: turned off for comparing, turned on again to see who draws which random numbers.

[Note: what can be said about dropout]
One process drops other entries than many ranks do: the numbers are drawn in another order. So the comparison is made
without dropout, and dropout is proved by two properties of its own. Ranks that see different samples must draw
different numbers; with a shared seed they would drop the same entries of every share of the batch. Ranks along `tp`,
which do parts of the same work, must drop the same entries of what they all hold; otherwise their copies of a
parameter that is not cut would drift apart.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.checkpoint import as_bytes, digest
from plait.config import Section
from plait.strategy import Engine
from plait.torch_internals import TorchDispatchMode
from plait.world import World, is_sharded, local_part


class Switch:
    """Every dropout of a model: turned off when made, turned on by `on`."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[str] = []
        self._found: list[tuple[nn.Module, str, Any]] = []
        for name, part in model.named_modules():
            for key, value in list(vars(part).items()):
                quiet = _without(value) if key == "config" else (0.0 if _is_rate(part, key, value) else None)
                if quiet is not None:
                    self._found.append((part, key, value))
                    setattr(part, key, quiet)
                    self.modules += [name] if name not in self.modules else []

    def on(self) -> None:
        """As the user has it."""
        for part, key, value in self._found:
            setattr(part, key, value)


def _is_rate(part: nn.Module, key: str, value: Any) -> bool:
    named = "drop" in key or "jitter" in key or (key == "p" and "Dropout" in type(part).__name__)
    return named and isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _without(config: Any) -> Any:
    """A model's own settings without dropout; None where they have none."""
    settings = config.__dict__ if hasattr(config, "__dict__") else {}
    rates = [key for key, value in settings.items() if "drop" in key and isinstance(value, float) and value > 0]
    if not rates:
        return None
    if isinstance(config, Section):
        return config.model_copy(update=dict.fromkeys(rates, 0.0))
    quiet = copy.copy(config)
    for key in rates:
        setattr(quiet, key, 0.0)
    return quiet


def random_state(device: torch.device) -> str:
    """A short name for where torch's default generators are."""
    state = torch.get_rng_state().numpy().tobytes()
    if device.type == "cuda":
        state += torch.cuda.get_rng_state(device).numpy().tobytes()
    return hashlib.blake2b(state, digest_size=12).hexdigest()


class Draw(NamedTuple):
    """One use of random numbers."""

    module: str
    operation: str
    numbers: str
    """Where the generator was: two draws from the same place get the same numbers."""


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """While open, notes every operation that takes random numbers, whoever asks for it.

    Hooks on dropout modules would miss what a model drops by a function call, or inside attention.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Draw] = []
        self._model = model
        self._device = device
        self._inside: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = random_state(self._device)
        result = func(*args, **(kwargs or {}))
        # Attention kernels count as random even where they drop nothing.
        if random_state(self._device) != before:
            where = self._inside[-1] if self._inside else ""
            self.found.append(Draw(where, str(func), before))
        return result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Open, with the names of the modules that are at work."""

        def enter(name: str) -> Any:
            return lambda *_: self._inside.append(name)

        def leave(*_: Any) -> None:
            self._inside.pop()

        handles: list[Any] = []
        for name, part in self._model.named_modules():
            handles.append(part.register_forward_pre_hook(enter(name)))
            handles.append(part.register_forward_hook(leave, always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()


def check_dropout(engine: Engine, micro_batches: Any) -> list[tuple[str, bool, str]]:
    """One step with dropout: what the ranks drew, and whether those along `tp` still agree. Every rank must ask."""
    world = engine.world
    draws = Draws(engine.model, world.device)
    with draws.watching():
        engine.train_step(micro_batches)
    everyone = world.gather((_place(world), draws.found))
    checks = [] if world.layout.replicas == 1 else [_apart(everyone)]
    if world.layout.tp > 1:
        checks.append(_alike(world.gather((_place(world), _copies(engine)))))
    return checks


def _place(world: World) -> dict[str, int]:
    return {axis: world.coordinate(axis) for axis in world.layout.sizes()}


def _apart(everyone: list[tuple[dict[str, int], list[Draw]]]) -> tuple[str, bool, str]:
    name = "ranks with different samples draw different numbers"
    compared = 0
    for (a, (first, ours)), (b, (second, theirs)) in combinations(enumerate(everyone), 2):
        if first["pp"] != second["pp"] or first["tp"] or second["tp"]:
            continue
        for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            compared += 1
            if one == other:
                where = one.module or "the model"
                text = f"ranks {a} and {b} drew the same numbers in {where} (draw {index + 1}, {one.operation})"
                return name, False, text
    return name, compared > 0, f"{compared} pairs of draws, all different" if compared else "no rank drew anything"


def _alike(everyone: list[tuple[dict[str, int], dict[str, str]]]) -> tuple[str, bool, str]:
    name = "ranks along tp drop alike"
    compared = 0
    for (a, (first, ours)), (b, (second, theirs)) in combinations(enumerate(everyone), 2):
        if {**first, "tp": 0} != {**second, "tp": 0}:
            continue
        for key, value in ours.items():
            compared += 1
            if theirs.get(key) != value:
                return name, False, f"after a step with dropout ranks {a} and {b} have different copies of {key}"
    return name, compared > 0, f"after a step with dropout {compared} pairs of copies are equal, bit for bit"


def _copies(engine: Engine) -> Mapping[str, str]:
    """A digest of each tensor that the ranks along `tp` all hold."""
    found = {}
    for name, tensor in engine.state_tensors().items():
        if not _cut_along_tp(tensor):
            found[name] = digest(as_bytes(local_part(tensor).detach().cpu().contiguous()))
    return found


def _cut_along_tp(tensor: Tensor) -> bool:
    if not is_sharded(tensor):
        return False
    axes = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=False)
    return any(axis == "tp" and not placement.is_replicate() for axis, placement in axes)
