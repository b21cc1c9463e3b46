"""A checkpoint in any format, opened for reading."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from plait.checkpoint.manifest import MANIFEST_NAME
from plait.errors import CheckpointError


class TensorEntry(NamedTuple):
    """Shape and dtype of a tensor, known without reading it."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.shape.numel() * self.dtype.itemsize


class Source(ABC):
    """An open checkpoint: names and shapes are known at once, values are read one tensor at a time.

    Names are Plait's in every format: `model.<parameter>`, `optim.<parameter>.<key>` with the keys of torch's
    optimizers (`exp_avg`, `exp_avg_sq`, `step`). Parameter names stay as they were written.
    """

    kind: str
    """`plait`, `hf`, `torch`, `deepspeed`, `megatron` or `dcp`."""
    path: Path
    entries: Mapping[str, TensorEntry]
    state: Mapping[str, Any]
    """State other than tensors under Plait's keys: `engine` ({steps, skips_in_a_row, scaler}), `config`, … Or {}."""
    facts: Mapping[str, str]
    """Facts to show: which program wrote it, at which step, on how many ranks."""

    @property
    def description(self) -> Path:
        """The file that `state` was read from, for messages; the checkpoint's path if it has no manifest."""
        manifest = self.path / MANIFEST_NAME
        return manifest if manifest.is_file() else self.path

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Return one whole tensor, on the CPU. It may be a view of a file: never write to it."""

    def verify(self) -> str:
        """Read every tensor, and return a summary. Raise a `CheckpointError` that names a damaged file."""
        for name in self.entries:
            self.read(name)
        return f"{len(self.entries)} tensors are complete; the format has no checksums to compare them with"

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Views: sources that rename, join, split or cast the tensors of another source, each tensor when it is read.


Recipe = tuple[tuple[str, ...], Callable[..., Tensor]]
"""How to compute one tensor: the names of its source tensors, and the function that takes them in that order.

The function must also work on meta tensors: the result's shape and dtype are computed with them.
"""

_EMA = "hook.ema."
_SHOWN = 12


class View(Source):
    """Entries computed from another source, each by its recipe, when it is read."""

    def __init__(
        self, source: Source, recipes: Mapping[str, Recipe], *, state: Mapping[str, Any] | None = None
    ) -> None:
        self.kind, self.path, self.facts = source.kind, source.path, source.facts
        self.state = source.state if state is None else state
        self._source, self._recipes = source, recipes
        self._last: tuple[tuple[str, ...], tuple[Tensor, ...]] = ((), ())
        self.entries = {name: _expected(source, recipe) for name, recipe in recipes.items()}

    def read(self, name: str) -> Tensor:
        """Return one tensor, computed by its recipe; what several recipes in a row take is read once."""
        names, make = self._recipes[name]
        if names != self._last[0]:
            self._last = (), ()  # freed before the next ones are read
            self._last = names, tuple(self._source.read(name) for name in names)
        return make(*self._last[1])

    def close(self) -> None:
        """Close the underlying source."""
        self._source.close()


class ProgressSource(Source):
    """A source that calls `on_read` with the size of every tensor that is read."""

    def __init__(self, source: Source, on_read: Callable[[int], None]) -> None:
        self.kind, self.path, self.facts, self.state = source.kind, source.path, source.facts, source.state
        self.entries = source.entries
        self._source, self._on_read = source, on_read

    def read(self, name: str) -> Tensor:
        """Return one tensor and report its size."""
        tensor = self._source.read(name)
        self._on_read(self.entries[name].bytes)
        return tensor

    def close(self) -> None:
        """Close the underlying source."""
        self._source.close()


def with_state(source: Source, state: Mapping[str, Any]) -> Source:
    """Return a view of the same tensors with another `state`."""
    return View(source, {name: _unchanged(name) for name in source.entries}, state=state)


def only(source: Source, *sections: str) -> Source:
    """Return a view of some sections: `model`, `optim`, …"""
    kept = tuple(f"{section}." for section in sections)
    return View(source, {name: _unchanged(name) for name in source.entries if name.startswith(kept)})


def averaged(source: Source) -> Source:
    """Return a view of the model without optimizer state, whose weights are the averages that the hook `ema` saved.

    The optimizer state is left out, as it belongs to the trained weights.
    """
    averages = {name.removeprefix(_EMA) for name in source.entries if name.startswith(_EMA)}
    if not averages:
        raise CheckpointError(
            f"{source.path} holds no averages of the weights: it was not saved with the hook `ema`; "
            "leave --weights out to take the weights themselves"
        )
    weights = [name.removeprefix("model.") for name in source.entries if name.startswith("model.")]
    recipes = {f"model.{n}": _unchanged(f"{_EMA}{n}" if n in averages else f"model.{n}") for n in weights}
    return View(source, recipes, state={key: value for key, value in source.state.items() if key == "config"})


def first_rows(source: Source, names: Iterable[str], count: int) -> Source:
    """Return a view with only the first `count` rows of some tensors."""
    cut = frozenset(names)

    def recipe(name: str) -> Recipe:
        return ((name,), lambda tensor: tensor[:count]) if name in cut else _unchanged(name)

    return View(source, {name: recipe(name) for name in source.entries})


def cast(source: Source, dtype: torch.dtype) -> Source:
    """Return a view with the floating-point weights in another dtype; everything else is unchanged."""

    def recipe(name: str) -> Recipe:
        if name.startswith("model.") and source.entries[name].dtype.is_floating_point:
            return (name,), lambda tensor: tensor.to(dtype)
        return _unchanged(name)

    return View(source, {name: recipe(name) for name in source.entries})


def translated(source: Source, made: Mapping[str, Recipe], *, unused: Iterable[str] = ()) -> Source:
    """Return a view of the model under other names, with the optimizer state of each parameter converted alike.

    `made` has the recipes by new parameter name, without `model.`. Missing tensors, and weights that no recipe uses,
    raise a `CheckpointError` that lists them; `unused` are regular expressions of names that may be left over. Sections
    other than model and optimizer are unchanged.
    """
    names = {name.removeprefix("model.") for name in source.entries if name.startswith("model.")}
    used = {source_name for sources, _ in made.values() for source_name in sources}
    left = sorted(name for name in names - used if not any(re.search(pattern, name) for pattern in unused))
    problems = [(name, "missing") for name in sorted(used - names)] + [(name, "not used") for name in left]
    if problems:
        shown = problems[:_SHOWN]
        width = max(len(name) for name, _ in shown)
        lines = [f"  {name:<{width}}  {what}" for name, what in shown]
        more = [f"  … and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
        raise CheckpointError("\n".join([f"{source.path} does not hold the model as described:", *lines, *more]))
    made = {target: recipe for target, recipe in made.items() if not _matches(recipe, unused)}
    recipes = {name: _unchanged(name) for name in source.entries if not name.startswith(("model.", "optim."))}
    keys: dict[str, set[str]] = {}
    for name in source.entries:
        if name.startswith("optim."):
            parameter, _, key = name.removeprefix("optim.").rpartition(".")
            keys.setdefault(parameter, set()).add(key)
    for target, (sources, make) in made.items():
        recipes[f"model.{target}"] = tuple(f"model.{source_name}" for source_name in sources), make
        for key in sorted(set.intersection(*(keys.get(source_name, set()) for source_name in sources))):
            recipes[f"optim.{target}.{key}"] = _optimizer_recipe(source, sources, key, make)
    return View(source, recipes)


def _matches(recipe: Recipe, patterns: Iterable[str]) -> bool:
    return all(any(re.search(pattern, name) for pattern in patterns) for name in recipe[0])


def _optimizer_recipe(source: Source, sources: tuple[str, ...], key: str, make: Callable[..., Tensor]) -> Recipe:
    names = tuple(f"optim.{source_name}.{key}" for source_name in sources)
    if all(source.entries[n].shape == source.entries[f"model.{p}"].shape for n, p in zip(names, sources, strict=True)):
        return names, make
    if all(source.entries[name].shape.numel() == 1 for name in names):
        return _unchanged(names[0])  # the step count, which is the same for parameters that are joined
    raise CheckpointError(
        f"{source.path}: {names[0]} has the shape {tuple(source.entries[names[0]].shape)}, not its parameter's, so it "
        "cannot be converted with the parameter; `--to torch` and `--to hf` take the weights alone"
    )


def _unchanged(name: str) -> Recipe:
    return (name,), lambda tensor: tensor


def _expected(source: Source, recipe: Recipe) -> TensorEntry:
    names, make = recipe
    made = make(*(torch.empty(e.shape, dtype=e.dtype, device="meta") for e in (source.entries[name] for name in names)))
    return TensorEntry(made.shape, made.dtype)
