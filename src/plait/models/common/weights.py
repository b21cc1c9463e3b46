"""Loading weights from safetensors, group by group, and converting them between names and shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from plait.config import read_json_object, weight_map
from plait.distributed import Region
from plait.errors import ModelError
from plait.precision import StoredShape, quantized_tensors
from plait.transformers_internals import WeightGroup

Put = Callable[[str, Tensor], None]
"""A function of a parameter's name in the model and its full tensor, or the region of it that `Wanted` returned."""
Translate = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
"""A function that converts one stored tensor to none, one or several of the model's. Must work on meta tensors too."""
Wanted = Callable[[str], Region | None]
"""A function that returns the region of a parameter that this rank needs; None if it needs nothing of it."""


class Group(Protocol):
    """Tensors that are converted together; `WeightGroup` of `transformers_internals` is one too."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the stored tensors."""

    @property
    def stacked(self) -> bool:
        """Whether rows of the one result can be computed from the sources that `rows` returns for them."""

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's tensors by name. Must work on meta tensors too."""

    def rows(self, rows: slice) -> tuple[str, ...]:
        """Return the sources of some rows of the result of a `stacked` group."""


class Reading(NamedTuple):
    """What loading a folder took on this rank."""

    missing: tuple[str, ...]
    """The parameters that the folder does not have."""
    bytes: int
    """Bytes that were read."""
    of: int
    """Bytes of all tensors in the folder."""
    held: int
    """The most bytes of stored and converted tensors that were in memory at a time."""


def weight_files(path: str | Path) -> dict[str, Path]:
    """Return the file of each tensor in a folder: from its index file, or its single `model.safetensors`.

    Raise a `ModelError` if there is neither.
    """
    folder = Path(path)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        file_of = weight_map(index, ModelError)
        lost = sorted({file for file in file_of.values() if not (folder / file).is_file()})
        if lost:
            raise ModelError(f"{index} lists files that do not exist: {', '.join(lost)}; copy them too")
        return {name: folder / file for name, file in file_of.items()}
    if single.is_file():
        return dict.fromkeys(_entries_in(single), single)
    raise ModelError(
        f"no weights in {str(folder)!r}: expected model.safetensors or model.safetensors.index.json. "
        "Save the model with safetensors, or set model.pretrained: false to start from random weights"
    )


class StoredWeights:
    """The tensors of a folder: names and shapes are known at once, values are read by region, one at a time.

    Quantized tensors appear as full ones; see `plait.precision.quantized_tensors`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = weight_files(path)
        self._readers: dict[Path, Any] = {}
        self._entered = ExitStack()
        entries = {file: _entries_in(file) for file in dict.fromkeys(self._files.values())}
        self.lost = {name: file.name for name, file in self._files.items() if name not in entries[file]}
        """Names in the index that their file, the value, does not have."""
        stored = {name: entries[file][name] for name, file in self._files.items() if name not in self.lost}
        self._dtypes = {name: entry.dtype for name, entry in stored.items()}
        self.bytes = sum(entry.shape.numel() * entry.dtype.itemsize for entry in stored.values())
        self.bytes_read = 0
        self._quantized, packed = quantized_tensors(stored, quantization_config(self.path), self._get, ModelError)
        self.shapes = {name: entry.shape for name, entry in stored.items() if name not in packed}
        """The shapes of all tensors, by name."""
        self.shapes |= {name: tensor.shape for name, tensor in self._quantized.items()}

    def read(self, name: str, region: Region = ()) -> Tensor:
        """Return a tensor, or a region of it."""
        quantized = self._quantized.get(name)
        if quantized is None:
            return self._get(name, region)
        rows = region[:1] if quantized.by_rows else ()
        full = quantized.make(*(self._get(source, rows) for source in quantized.sources))
        return full[(slice(None), *region[1:])] if rows else full[region]

    def _get(self, name: str, region: Region = ()) -> Tensor:
        file = self._files[name]
        reader = self._readers.get(file)
        if reader is None:
            reader = self._readers[file] = self._entered.enter_context(safe_open(file, framework="pt"))
        tensor: Tensor = reader.get_slice(name)[region] if region else reader.get_tensor(name)
        self.bytes_read += tensor.nbytes
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()


def quantization_config(folder: Path) -> dict[str, Any] | None:
    """Return the `quantization_config` in a folder's `config.json`; None if there is none."""
    file = folder / "config.json"
    described = read_json_object(file, ModelError).get("quantization_config") if file.is_file() else None
    return described if isinstance(described, dict) else None


def stream_weights(
    model: nn.Module,
    path: str | Path,
    put: Put,
    *,
    translate: Translate,
    may_miss: Sequence[str] = (),
    may_skip: Sequence[str] = (),
) -> tuple[str, ...]:
    """Pass every tensor of a folder to `put`; return the names of parameters that the folder does not have.

    See `stream_groups`; here, each stored tensor is converted alone, by `translate`.
    """

    def groups(stored: Iterable[str]) -> Iterator[Group]:
        return (_Translated((name,), translate) for name in stored)

    return stream_groups(model, path, put, groups=groups, may_miss=may_miss, may_skip=may_skip).missing


@dataclass(frozen=True, slots=True)
class _Translated:
    """A group of one stored tensor, which a function translates."""

    sources: tuple[str, ...]
    translate: Translate
    stacked: ClassVar[bool] = False

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(self.translate(self.sources[0], tensors[self.sources[0]]))

    def rows(self, rows: slice) -> tuple[str, ...]:
        raise NotImplementedError


def stream_groups(
    model: nn.Module,
    path: str | Path,
    put: Put,
    *,
    groups: Callable[[Iterable[str]], Iterable[Group]],
    wanted: Wanted = lambda _: (),
    may_miss: Sequence[str] = (),
    may_skip: Sequence[str] = (),
) -> Reading:
    """Convert the tensors of a folder group by group, and pass to `put` what is `wanted`.

    All names and shapes are compared before the first tensor is read; a mismatch raises a `ModelError` that lists them.
    `may_miss` are patterns of parameters that the folder may lack; `may_skip` are patterns of converted names that the
    model may lack. At most the stored tensors of one group are in memory at a time, and only those are read that this
    rank needs: no group of other ranks, of a stack of experts its own, of a tensor with only another name its region.
    """
    with StoredWeights(path) as stored:
        expected, aliases = _expected(model)
        planned, missing = _plan(stored, list(groups(stored.shapes)), expected, aliases, may_miss, may_skip)
        held = 0
        for group, targets in planned:
            regions = {target: region for target in targets.values() if (region := wanted(target)) is not None}
            if not regions:
                continue
            tensors, region = _read(stored, group, list(regions.values()))
            results = group.convert(tensors)
            held = max(held, _bytes_of([*tensors.values(), *results.values()]))
            del tensors
            for alias, target in targets.items():
                if target in regions:
                    tensor = results.pop(alias)
                    put(target, tensor[_remaining(regions[target], region)])
    return Reading(missing, stored.bytes_read, stored.bytes, held)


def _plan(
    stored: StoredWeights,
    groups: Sequence[Group],
    expected: Mapping[str, torch.Size],
    aliases: Mapping[str, str],
    may_miss: Sequence[str],
    may_skip: Sequence[str],
) -> tuple[list[tuple[Group, dict[str, str]]], tuple[str, ...]]:
    """Return each group with the parameters that it fills (result → name in the model), and what is missing.

    Raise a `ModelError` unless all names and shapes fit.
    """
    problems = [(name, f"in the index, but not in {file}") for name, file in stored.lost.items()]
    planned: list[tuple[Group, dict[str, str]]] = []
    filled: set[str] = set()
    for group in groups:
        meta = {name: torch.empty(stored.shapes[name], device="meta") for name in group.sources}
        first, more = group.sources[0], f" and {len(group.sources) - 1} others" if len(group.sources) > 1 else ""
        try:
            results = group.convert(meta)
        except Exception as error:  # an operation on tensors of other shapes than it was written for
            shapes = ", ".join(dict.fromkeys(str(tuple(tensor.shape)) for tensor in meta.values()))
            problems.append((first, f"{shapes}{more} cannot be converted: {error}"))
            continue
        targets: dict[str, str] = {}
        for alias, tensor in results.items():
            name = aliases.get(alias, alias)
            if name not in expected:
                if not _matches(alias, may_skip):
                    problems.append((first, f"unexpected{more}: the model has no such parameter"))
                continue
            if expected[name] != tensor.shape:
                problems.append((first, f"shape {tuple(tensor.shape)}{more}, model has {tuple(expected[name])}"))
            if name not in filled:
                targets[alias] = name
                filled.add(name)
        planned.append((group, targets))
    missing = tuple(name for name in expected if name not in filled)
    problems += [(name, "missing from the folder") for name in missing if not _matches(name, may_miss)]
    if problems:
        raise ModelError(f"the weights in {str(stored.path)!r} do not fit the model:\n{_table(problems)}")
    return planned, missing


def _read(stored: StoredWeights, group: Group, regions: Sequence[Region]) -> tuple[dict[str, Tensor], Region]:
    """Return what has to be read of a group's sources, and the region of the results that can be computed from it."""
    if len(regions) == 1 and regions[0]:
        (region,) = regions
        if isinstance(group, WeightGroup) and group.renames:
            return {name: stored.read(name, region) for name in group.sources}, region
        if group.stacked:
            return {name: stored.read(name) for name in group.rows(region[0])}, region[:1]
    return {name: stored.read(name) for name in group.sources}, ()


def _remaining(wanted: Region, read: Region) -> Region:
    """Return which region of a tensor of the region `read` is `wanted`."""
    return tuple(slice(None) for _ in read) + wanted[len(read) :]


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors; views of one storage count once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model by name; tied ones once, under their first name."""
    named = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    first = {id(tensor): name for name, tensor in reversed(named.items())}
    return {name: tensor for name, tensor in named.items() if first[id(tensor)] == name}


def _expected(model: nn.Module) -> tuple[dict[str, torch.Size], dict[str, str]]:
    """Return the shapes of parameters and persistent buffers by name, and further names of tied ones → the first."""
    unique = unique_tensors(model)
    names = {id(tensor): name for name, tensor in unique.items()}
    others = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor) and n not in unique}
    return {name: t.shape for name, t in unique.items()}, {name: names[id(t)] for name, t in others.items()}


def _entries_in(path: Path) -> dict[str, StoredShape]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in list(file.keys())}
            return {
                name: StoredShape(torch.Size(view.get_shape()), _dtype_of(file, name, view.get_dtype()))
                for name, view in slices.items()
            }
    except (SafetensorError, OSError, UnicodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); copy it again") from error


def _dtype_of(file: Any, name: str, dtype: str) -> torch.dtype:
    return _DTYPES[dtype] if dtype in _DTYPES else file.get_tensor(name).dtype


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes by their names in safetensors; others are taken from the tensor."""


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _table(problems: list[tuple[str, str]], limit: int = 20) -> str:
    width = max(len(name) for name, _ in problems[:limit])
    lines = [f"  {name:<{width}}  {what}" for name, what in problems[:limit]]
    if len(problems) > limit:
        lines.append(f"  … and {len(problems) - limit} more")
    return "\n".join(lines)


class Made(NamedTuple):
    """How to compute a tensor of one naming scheme from those of another: call `make` with the tensors named `sources`.

    `make` takes full (not sharded) tensors, and must work on meta tensors too.
    """

    sources: tuple[str, ...]
    make: Callable[..., Tensor]


def same(tensor: Tensor) -> Tensor:
    """Return the tensor itself: a `Made.make` for a tensor that only has another name."""
    return tensor


def are_unchanged(made: Mapping[str, Made]) -> bool:
    """Return whether all tensors only keep their names and values."""
    return all(recipe == Made((name,), same) for name, recipe in made.items())


class Conversions:
    """Computes results of groups for recipes that take one each; keeps those of the last group, for the next recipe."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._tensors: tuple[Tensor, ...] = ()
        self._results: dict[str, Tensor] = {}

    def made(self, group: Group, name: str) -> Made:
        """Return the recipe for one result of a group."""
        return Made(group.sources, partial(self._compute, group, name))

    def _compute(self, group: Group, name: str, *tensors: Tensor) -> Tensor:
        known = self._group is group and all(map(_is_same, tensors, self._tensors))
        if not known:
            self._results = {}  # freed before the next ones are computed
            self._results = group.convert(dict(zip(group.sources, tensors, strict=True)))
            self._group, self._tensors = group, tensors
        return self._results[name]


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.is_meta and b.is_meta and a.shape == b.shape and a.dtype == b.dtype)


def by_translation(translate: Translate, shapes: Mapping[str, torch.Size]) -> dict[str, Made]:
    """Return how to compute each tensor that `translate` gives for stored tensors of these names and shapes."""
    made: dict[str, Made] = {}
    for stored, shape in shapes.items():
        for index, (name, _) in enumerate(translate(stored, torch.empty(shape, device="meta"))):
            made.setdefault(name, Made((stored,), partial(_piece, translate, stored, index)))
    return made


def _piece(translate: Translate, stored: str, index: int, tensor: Tensor) -> Tensor:
    return list(translate(stored, tensor))[index][1]
