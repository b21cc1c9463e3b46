"""A checkpoint of any kind, opened for reading."""

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
    """What is known of a tensor without reading it."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.shape.numel() * self.dtype.itemsize


class Source(ABC):
    """Names and shapes at once, values one tensor at a time: a conversion never holds the whole.

    Names are Plait's, whatever wrote the checkpoint: `model.<parameter>`, `optim.<parameter>.<key>` with the keys of
    torch's optimizers (`exp_avg`, `exp_avg_sq`, `step`). Parameter names stay as the writer had them.
    """

    kind: str
    """`plait`, `hf`, `torch`, `deepspeed`, `megatron` or `dcp`."""
    path: Path
    entries: Mapping[str, TensorEntry]
    state: Mapping[str, Any]
    """What is no tensor and has a meaning in Plait: `engine` ({steps, skips_in_a_row, scaler}), `config`, … or {}."""
    facts: Mapping[str, str]
    """What a reader wants to know of it besides: who wrote it, at which step, for how many ranks."""

    @property
    def description(self) -> Path:
        """The file that `state` was read from, for messages; the checkpoint itself where it has no manifest."""
        manifest = self.path / MANIFEST_NAME
        return manifest if manifest.is_file() else self.path

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One whole tensor, on the CPU. It may be a view of a file: never write to it."""

    def verify(self) -> str:
        """Read all of it, and say what that has shown. Damage is a `CheckpointError` that names the file."""
        for name in self.entries:
            self.read(name)
        return f"{len(self.entries)} tensors are there, to the last byte; there are no checksums to compare them with"

    @abstractmethod
    def close(self) -> None:
        """Let go of the files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# A source seen otherwise: under other names, joined or split, in another dtype. Nothing is read before its time.


Recipe = tuple[tuple[str, ...], Callable[..., Tensor]]
"""The tensors that one is made of, and how; must work on meta tensors too."""

_EMA = "hook.ema."
_SHOWN = 12


class View(Source):
    """Entries of another source, each made by its recipe when it is read."""

    def __init__(
        self, source: Source, recipes: Mapping[str, Recipe], *, state: Mapping[str, Any] | None = None
    ) -> None:
        self.kind, self.path, self.facts = source.kind, source.path, source.facts
        self.state = source.state if state is None else state
        self._source, self._recipes = source, recipes
        self.entries = {name: _expected(source, recipe) for name, recipe in recipes.items()}

    def read(self, name: str) -> Tensor:
        """Make one tensor."""
        names, make = self._recipes[name]
        return make(*(self._source.read(name) for name in names))

    def close(self) -> None:
        """Close what lies beneath."""
        self._source.close()


class ProgressSource(Source):
    """A source that tells how much of it was read."""

    def __init__(self, source: Source, on_read: Callable[[int], None]) -> None:
        self.kind, self.path, self.facts, self.state = source.kind, source.path, source.facts, source.state
        self.entries = source.entries
        self._source, self._on_read = source, on_read

    def read(self, name: str) -> Tensor:
        """Read one tensor and tell its size."""
        tensor = self._source.read(name)
        self._on_read(self.entries[name].bytes)
        return tensor

    def close(self) -> None:
        """Close what lies beneath."""
        self._source.close()


def with_state(source: Source, state: Mapping[str, Any]) -> Source:
    """The same tensors, with other state beside them."""
    return View(source, {name: _unchanged(name) for name in source.entries}, state=state)


def only(source: Source, *sections: str) -> Source:
    """The entries of some parts: `model`, `optim`, …"""
    kept = tuple(f"{section}." for section in sections)
    return View(source, {name: _unchanged(name) for name in source.entries if name.startswith(kept)})


def averaged(source: Source) -> Source:
    """The model alone, with the moving averages that the hook `ema` saved in place of the weights it trained.

    No optimizer goes with them: its state belongs to the weights.
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
    """The same, with no more than so many rows of some tensors."""
    cut = frozenset(names)

    def recipe(name: str) -> Recipe:
        return ((name,), lambda tensor: tensor[:count]) if name in cut else _unchanged(name)

    return View(source, {name: recipe(name) for name in source.entries})


def cast(source: Source, dtype: torch.dtype) -> Source:
    """The weights in another dtype; what is no weight, and what is no float, stays as it is."""

    def recipe(name: str) -> Recipe:
        if name.startswith("model.") and source.entries[name].dtype.is_floating_point:
            return (name,), lambda tensor: tensor.to(dtype)
        return _unchanged(name)

    return View(source, {name: recipe(name) for name in source.entries})


def translated(source: Source, made: Mapping[str, Recipe], *, unused: Iterable[str] = ()) -> Source:
    """The same model under other names, with the optimizer state of each parameter in the same way.

    `made` speaks of parameters, without `model.`. Parts that are missing and entries that nothing is made of are
    an error with a table; `unused` are patterns of names that may be left over. Parts other than model and
    optimizer stay as they are.
    """
    names = {name.removeprefix("model.") for name in source.entries if name.startswith("model.")}
    used = {source_name for sources, _ in made.values() for source_name in sources}
    left = sorted(name for name in names - used if not any(re.search(pattern, name) for pattern in unused))
    problems = [(name, "missing") for name in sorted(used - names)] + [(name, "no place for it") for name in left]
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
        return _unchanged(names[0])  # a count of steps, which joined parameters have in common
    raise CheckpointError(
        f"{source.path}: {names[0]} has the shape {tuple(source.entries[names[0]].shape)} and not its parameter's, "
        "so it cannot follow the parameter to another layout; `--to torch` and `--to hf` take the weights alone"
    )


def _unchanged(name: str) -> Recipe:
    return (name,), lambda tensor: tensor


def _expected(source: Source, recipe: Recipe) -> TensorEntry:
    names, make = recipe
    made = make(*(torch.empty(e.shape, dtype=e.dtype, device="meta") for e in (source.entries[name] for name in names)))
    return TensorEntry(made.shape, made.dtype)
