"""Deferred initialization: the operations of a constructor, recorded on the meta device and repeated with storage.

`ConstructionRecord` records, `find_replay` returns a `Replay`, and a `Replay` repeats.

[Note: the constructor is the initializer]
The operations of a model's constructor are recorded on the meta device ([Note: what can be done again]), and repeated
for one module at a time. Each tensor then has values of the same distribution as if the constructor had run with
storage: also where the constructor overwrites what torch's layers have drawn. The values themselves differ, because
each module draws from its own seed ([Note: initial values do not depend on the layout], `materialize.py`). Therefore
the numbers of one random operation must not be used in two modules: layers that the constructor made equal, as copies
of one, would become different. A model where that happens is built on a real device, and so is one with two parameters
that share a storage without being the same parameter.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from plait.torch_internals import (
    has_schema,
    intercept_operations,
    name_of_truncated_normal,
    schema_of,
    storage_key,
    tree_leaves,
    tree_map,
)

# ---- recording
#
# [Note: what can be done again]
# On the meta device a constructor runs without values. Every operation that creates or changes a tensor is recorded
# with its arguments. A tensor argument is recorded as a region of a storage, so views need not be recorded as
# operations. The operations that determine the values of a tensor are found backwards from the last one, up to one that
# overwrites all elements without reading them. They cannot be repeated if one of them
# - reads a tensor that was not recorded: on another device, from a file, from numpy;
# - draws random numbers from a generator that the constructor passes;
# - replaces a tensor's storage, or has an argument that is not a plain dense tensor;
# - came after code asked whether the tensor is on the meta device: the code may have skipped operations if so.
# Some functions of `nn.init` ask that too. They are known (`_WHOLE`), and each is recorded as one operation.


_aten = torch.ops.aten
_DRAWS = frozenset({_aten.normal_.default, _aten.uniform_.default})
"""Not run on the meta device, where they only make torch import its compiler: [Note: dynamo is loaded late]."""
_OVERWRITES = frozenset(
    {_aten.normal_, _aten.uniform_, _aten.fill_, _aten.zero_, _aten.copy_, _aten.exponential_, _aten.log_normal_}
)
"""Operations that do not read the tensor that they write to."""
_ALLOCATES = frozenset({_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided})
"""Operations that return uninitialized tensors."""
_EXCHANGES = frozenset({_aten.set_, _aten.resize_, _aten.resize_as_})
"""Operations that give a tensor another storage, or change its size."""
_READS_NUMBERS = frozenset({torch.tensor, torch.as_tensor})
"""Functions that create a tensor from Python numbers; torch does not dispatch this as an operation."""


@dataclass(frozen=True, slots=True)
class StorageRegion:
    """A tensor in a record: the number of its storage, and which elements of the storage it has."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_all: bool
    """Whether the tensor has all elements of the storage, in order."""


@dataclass(frozen=True, slots=True)
class InitFunction:
    """A function of `nn.init`, looked up by its name when it is called."""

    name: str

    def __call__(self, tensor: Tensor, **kwargs: Any) -> Any:
        """Fill a tensor, and return what the function returns."""
        return getattr(nn.init, self.name)(tensor, **kwargs)


_WHOLE = {
    getattr(nn.init, name).__code__: InitFunction(name)
    for name in (name_of_truncated_normal(), "orthogonal_", "sparse_", "dirac_")
}
"""Functions of `nn.init`, by their code, that do nothing on the meta device, and elsewhere fill the whole tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedOperation:
    """One operation of a record, with regions in place of tensors."""

    number: int
    function: Callable[..., Any] | None
    """None: no operation, only a mark that values cannot be repeated from here on (`repeatable` is False)."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    written: tuple[StorageRegion, ...] = ()
    made: tuple[StorageRegion | None, ...] = ()
    """For each tensor of the result: its region if its storage is a new one, else None."""
    repeatable: bool = True
    draws: bool = False

    @property
    def read(self) -> list[StorageRegion]:
        """The regions of the tensor arguments, except one that is overwritten without being read."""
        given = [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, StorageRegion)]
        overwrites = (
            isinstance(self.function, InitFunction) or getattr(self.function, "overloadpacket", None) in _OVERWRITES
        )
        return given[1:] if overwrites else given

    def replaces(self, storage: int) -> bool:
        """Return whether the operation determines all of a storage, whatever the storage contained before."""
        if any(region.storage == storage for region in self.read):
            return False
        made = any(region is not None and region.storage == storage for region in self.made)
        return made or any(region.storage == storage and region.is_all for region in self.written)

    def does_as(self, other: RecordedOperation) -> bool:
        """Return whether another operation has the same function and arguments, apart from the storages."""
        return bool(self._what() == other._what())

    def _what(self) -> Any:
        def nameless(leaf: Any) -> Any:
            return (leaf.offset, leaf.shape, leaf.stride) if isinstance(leaf, StorageRegion) else leaf

        return self.function, tree_map(nameless, (self.args, dict(self.kwargs)))


class ConstructionRecord:
    """A context manager that records the operations that run inside it, for later queries."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # kept alive, so that no address is reused
        self._ops: list[list[RecordedOperation]] = []
        self._count = 0
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as entering:
            entering.enter_context(intercept_operations(self._run))
            entering.enter_context(_RecordCalls(self))
            self._entered = entering.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, except random ones on the meta device; record it and return its result."""
        result = args[0] if func in _DRAWS and _on_meta(args[0]) else func(*args, **kwargs)
        written = []
        for index, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        self.add(func, args, kwargs, written=written, result=result)
        return result

    # ---- queries, after recording

    def region_of(self, tensor: Tensor) -> StorageRegion | None:
        """Return the region of a tensor; None if the tensor cannot be an argument of a repeated operation."""
        if type(tensor) not in (Tensor, nn.Parameter) or not _on_meta(tensor) or tensor.layout != torch.strided:
            return None
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return None
        storage = self._number(tensor)
        is_all = tensor.numel() * tensor.itemsize == self.bytes_of(storage) and tensor.is_contiguous()
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return StorageRegion(storage, int(tensor.storage_offset()), shape, stride, tensor.dtype, is_all)

    def bytes_of(self, storage: int) -> int:
        """Return the size of a storage in bytes."""
        return self._storages[storage].nbytes()

    def writes_to(self, tensor: Tensor) -> list[RecordedOperation]:
        """Return the operations that wrote to the storage of a tensor, in order."""
        if is_lazy(tensor):
            return []
        storage = self._number(tensor)
        return [op for op in self._ops[storage] if any(region.storage == storage for region in op.written)]

    def ops_to(self, region: StorageRegion) -> tuple[RecordedOperation, ...] | None:
        """Return the operations that determine the values of a region, in order; None if they cannot be repeated."""
        needed: dict[int, RecordedOperation] = {}
        seen: set[tuple[int, int]] = set()
        pending = [(region.storage, self._count)]
        while pending:
            storage, before = pending.pop()
            if (storage, before) in seen:
                continue
            seen.add((storage, before))
            for op in reversed(self._ops[storage]):
                if op.number >= before:
                    continue
                if not op.repeatable:
                    return None
                needed[op.number] = op
                pending += [(region.storage, op.number) for region in op.read if region.storage != storage]
                if op.replaces(storage):
                    break
        any_write = any(region.storage in _storages(op) for op in needed.values())
        return tuple(needed[number] for number in sorted(needed)) if any_write else None

    # ---- recording

    def add(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, written: list[Tensor], result: Any = None
    ) -> None:
        """Record one operation that has run; it has created the tensors of `result` whose storages are new."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        regions = {id(tensor): self.region_of(tensor) for tensor in given}
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        made = tuple(self.region_of(leaf) if self._is_new(leaf) else None for leaf in results)
        into = tuple(region for tensor in written if (region := regions[id(tensor)]) is not None)
        for tensor in written:
            if regions[id(tensor)] is None:
                self.mark_unrepeatable(tensor)
        packet = getattr(function, "overloadpacket", function)
        if packet in _ALLOCATES or not (into or any(made)):
            return
        if not given:  # the default device and dtype may have changed when it is repeated
            defaults = {"device": results[0].device, "dtype": results[0].dtype}
            kwargs = kwargs | {key: value for key, value in defaults.items() if _takes(function, key)}
        own_generator = any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs)))
        args, kwargs = tree_map(lambda leaf: regions[id(leaf)] if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        op = RecordedOperation(
            self._next(),
            function,
            args,
            kwargs,
            written=into,
            made=made,
            repeatable=None not in regions.values() and packet not in _EXCHANGES and not own_generator,
            draws=isinstance(function, InitFunction)
            or torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()),
        )
        for storage in _storages(op):
            self._ops[storage].append(op)

    def mark_unrepeatable(self, tensor: Tensor) -> None:
        """Record that the values that a tensor has now cannot be computed again."""
        if _on_meta(tensor) and not is_lazy(tensor):
            self._ops[self._number(tensor)].append(RecordedOperation(self._next(), None, repeatable=False))

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _is_new(self, tensor: Tensor) -> bool:
        return _on_meta(tensor) and storage_key(tensor) not in self._numbers and self._register(tensor)

    def _number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; one that no recorded operation created is marked unrepeatable."""
        key = storage_key(tensor)  # the public `data_ptr` is 0 for every storage on the meta device
        if key not in self._numbers:
            self._register(tensor)
            self.mark_unrepeatable(tensor)
        return self._numbers[key]

    def _register(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        self._numbers[storage_key(storage)] = len(self._storages)
        self._storages.append(storage)
        self._ops.append([])
        return True


class _RecordCalls(TorchFunctionMode):
    """Records calls that torch does not dispatch as operations: `torch.tensor` of numbers, and reads of `is_meta`."""

    def __init__(self, record: ConstructionRecord) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _READS_NUMBERS and not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            numbers = copy.deepcopy(args[0] if args else kwargs["data"])
            self._record.add(torch.tensor, (numbers,), {}, written=[], result=result)
        elif func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            caller = sys._getframe(1)
            if caller.f_code in _WHOLE:
                _, *names = inspect.getargs(caller.f_code).args
                given = {name: caller.f_locals[name] for name in names}
                self._record.add(_WHOLE[caller.f_code], args, given, written=[args[0]])
            else:
                self._record.mark_unrepeatable(args[0])
        return result


def _takes(function: Any, name: str) -> bool:
    return not has_schema(function) or any(argument.name == name for argument in schema_of(function).arguments)


def _storages(op: RecordedOperation) -> set[int]:
    return {region.storage for region in (*op.written, *op.made) if region is not None}


def _on_meta(tensor: Tensor) -> bool:
    """Return `tensor.is_meta`, which `_RecordCalls` would record."""
    return tensor.device.type == "meta"


# ---- repeating


Origin = tuple[StorageRegion, tuple[RecordedOperation, ...]]
"""The region of a tensor, and the operations that determine its values."""


class Replay:
    """An initializer that repeats the recorded operations of a model's constructor, for one module at a time."""

    def __init__(
        self, model: nn.Module, origins: Mapping[str, Mapping[str, Origin]], built: ConstructionRecord
    ) -> None:
        """`origins` has an `Origin` for each tensor, by the name of its module and its own name in it."""
        self._origins, self._built = origins, built
        self._names = {id(module): name for name, module in model.named_modules()}

    def onto(self, model: nn.Module) -> Replay:
        """Return the same initializer for another model whose modules have the same names, such as a pipeline stage."""
        return Replay(model, self._origins, self._built)

    def __call__(self, module: nn.Module) -> None:
        """Fill the parameters and buffers of one module that are not on the meta device, without its children's."""
        known = self._origins.get(self._names[id(module)], {})
        targets = {key: tensor.detach() for key, tensor in direct_tensors(module).items() if key in known}
        targets = {key: tensor for key, tensor in targets.items() if not tensor.is_meta}
        if targets:
            with torch.no_grad():
                self._fill(targets, {key: known[key] for key in targets})

    def _fill(self, targets: Mapping[str, Tensor], origins: Mapping[str, Origin]) -> None:
        ops = {op.number: op for _, ops_of_tensor in origins.values() for op in ops_of_tensor}
        made = {region.storage for op in ops.values() for region in op.made if region is not None}
        storages = _RealStorages(self._built, next(iter(targets.values())).device)
        for key, (region, _) in origins.items():
            target = targets[key]
            assert target.shape == region.shape, f"{key} was built as {region.shape} and is {tuple(target.shape)}"
            # If the operations only write to a storage, they write directly to the target, without other memory.
            if region.is_all and region.storage not in made and target.dtype == region.dtype and target.is_contiguous():
                storages.flat[region.storage] = target.view(-1)
        finished = set(storages.flat)
        for number in sorted(ops):
            storages.run(ops[number])
        for key, (region, _) in origins.items():
            if region.storage not in finished:
                targets[key].copy_(storages.at(region))


class _RealStorages:
    """Storages on a real device that replace the recorded ones while operations are repeated."""

    def __init__(self, built: ConstructionRecord, device: torch.device) -> None:
        self._built, self._device = built, device
        self.flat: dict[int, Tensor] = {}
        """For each storage number, a flat tensor of all its elements."""

    def run(self, op: RecordedOperation) -> None:
        """Repeat one operation; store the tensors that it creates."""
        assert op.function is not None
        args, kwargs = tree_map(self._real, (op.args, dict(op.kwargs)))
        answer = op.function(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]
        for result, region in zip(results, op.made, strict=False):
            if region is not None:
                self._put(region, result)

    def _put(self, region: StorageRegion, tensor: Tensor) -> None:
        """Store a tensor as a region; it is copied only if its layout differs from the recorded one."""
        bytes_ = self._built.bytes_of(region.storage)
        alike = tensor.stride() == region.stride and tensor.storage_offset() == region.offset == 0
        if alike and tensor.untyped_storage().nbytes() == bytes_:
            self.flat[region.storage] = tensor.as_strided((bytes_ // region.dtype.itemsize,), (1,))
        else:
            self.at(region).copy_(tensor)

    def at(self, region: StorageRegion) -> Tensor:
        """Return the tensor of a region, in a new storage if it has none yet."""
        if region.storage not in self.flat:
            count = self._built.bytes_of(region.storage) // region.dtype.itemsize
            self.flat[region.storage] = torch.empty(count, dtype=region.dtype, device=self._device)
        return self.flat[region.storage].view(region.dtype).as_strided(region.shape, region.stride, region.offset)

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return self._device
        return self.at(leaf) if isinstance(leaf, StorageRegion) else leaf


def find_replay(model: nn.Module, built: ConstructionRecord) -> Replay | None:
    """Return an initializer that repeats a model's constructor; None if that is not possible.

    `built` is the record of the constructor. See [Note: the constructor is the initializer].
    """
    origins: dict[str, dict[str, Origin]] = {}
    drawn_for: dict[int, int] = {}
    owners: dict[int, int] = {}
    lies_at: dict[int, int] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, tensor in direct_tensors(module).items():
            region = built.region_of(tensor)
            ops = None if region is None else built.ops_to(region)
            if region is None or ops is None:
                return None
            origins.setdefault(name, {})[key] = region, ops
            owner = id(module)
            if isinstance(tensor, nn.Parameter):
                owner = owners.setdefault(id(tensor), owner)  # a tied parameter is initialized with its first module
                if lies_at.setdefault(region.storage, id(tensor)) != id(tensor):
                    return None
            if any(op.draws and drawn_for.setdefault(op.number, owner) != owner for op in ops):
                return None
    return Replay(model, origins, built)


def direct_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name, without those of its children."""
    held = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in held.items() if tensor is not None}
