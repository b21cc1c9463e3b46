"""Doing again what a constructor did, where there is memory for its values.

[Note: the constructor is the initializer]
A constructor's steps were recorded on the meta device ([Note: what can be done again]). Done again,
module by module, they give every tensor values of the distribution that the constructor gave it: whatever it drew and
wrote, over whatever torch's layers had written before. They are not the numbers of one run of the constructor, since
each module draws from a seed of its own ([Note: initial values do not depend on the layout], `materialize.py`).
So nothing that was drawn may reach two modules: equal layers, made as copies of one, would become different. Such a
model is built for real, and so is one of whose parameters two share their memory without being one parameter.
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
    TorchDispatchMode,
    has_schema,
    name_of_truncated_normal,
    schema_of,
    storage_key,
    tree_leaves,
    tree_map,
)

# What a constructor does to tensors that have no values yet, written down so that it can be done later.
#
# [Note: what can be done again]
# On the meta device a constructor runs, but its numbers are lost. What it did is not: every operation that made or
# changed a tensor is a step, with its arguments. A tensor among these is kept as its place, that is a storage and which
# of its elements, so views need no steps of their own. The steps that a tensor's values come from are found from the
# last one backwards, up to one that does not care what was there before. They cannot be done again if one of them
# - takes a tensor from outside: of another device, from a file, from numpy;
# - draws from a generator of the constructor's own;
# - exchanges a tensor's storage, or was done to no plain dense tensor;
# - came after somebody had asked whether the tensor is on the meta device, perhaps in order to do nothing there.
# Some functions of `nn.init` ask for just that. They are known, and are steps as a whole.


_aten = torch.ops.aten
_DRAWS = frozenset({_aten.normal_.default, _aten.uniform_.default})
"""There is nothing to draw on the meta device, and torch would load its compiler: [Note: dynamo is loaded late]."""
_OVERWRITES = frozenset(
    {_aten.normal_, _aten.uniform_, _aten.fill_, _aten.zero_, _aten.copy_, _aten.exponential_, _aten.log_normal_}
)
"""Do not look at what they write to."""
_ALLOCATES = frozenset({_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided})
"""Make tensors without values."""
_EXCHANGES = frozenset({_aten.set_, _aten.resize_, _aten.resize_as_})
"""Give a tensor another storage."""
_READS_NUMBERS = frozenset({torch.tensor, torch.as_tensor})
"""Make a tensor of Python's numbers, which no operation shows."""


@dataclass(frozen=True, slots=True)
class StorageRegion:
    """Where a tensor lies: the number of a storage, and which of its elements."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_all: bool
    """Whether these are all elements of the storage, one after another."""


@dataclass(frozen=True, slots=True)
class InitFunction:
    """A function of `nn.init`, as it is whenever it is called."""

    name: str

    def __call__(self, tensor: Tensor, **kwargs: Any) -> Any:
        """Fill a tensor."""
        return getattr(nn.init, self.name)(tensor, **kwargs)


_WHOLE = {
    getattr(nn.init, name).__code__: InitFunction(name)
    for name in (name_of_truncated_normal(), "orthogonal_", "sparse_", "dirac_")
}
"""Those that ask first whether a tensor is on the meta device, and do nothing if it is; else they fill all of it."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedOperation:
    """One operation, with places instead of tensors."""

    number: int
    function: Callable[..., Any] | None
    """None: nothing was done, but somebody may have left it undone."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    written: tuple[StorageRegion, ...] = ()
    made: tuple[StorageRegion | None, ...] = ()
    """For each tensor of the result: its place where it has a storage of its own."""
    repeatable: bool = True
    draws: bool = False

    @property
    def read(self) -> list[StorageRegion]:
        """The tensors among the arguments, except one that is written to without being looked at."""
        given = [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, StorageRegion)]
        overwrites = (
            isinstance(self.function, InitFunction) or getattr(self.function, "overloadpacket", None) in _OVERWRITES
        )
        return given[1:] if overwrites else given

    def replaces(self, storage: int) -> bool:
        """Whether nothing that was in a storage before can be told afterwards."""
        if any(place.storage == storage for place in self.read):
            return False
        made = any(place is not None and place.storage == storage for place in self.made)
        return made or any(place.storage == storage and place.is_all for place in self.written)

    def does_as(self, other: RecordedOperation) -> bool:
        """Whether another step does the same, perhaps to another tensor."""
        return bool(self._what() == other._what())

    def _what(self) -> Any:
        def nameless(leaf: Any) -> Any:
            return (leaf.offset, leaf.shape, leaf.stride) if isinstance(leaf, StorageRegion) else leaf

        return self.function, tree_map(nameless, (self.args, dict(self.kwargs)))


class ConstructionRecord:
    """The steps that are done while it is entered."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # kept, so that no other ever has the address of one of them
        self._steps: list[list[RecordedOperation]] = []
        self._count = 0
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as entering:
            entering.enter_context(_RecordOperations(self))
            entering.enter_context(_Calls(self))
            self._entered = entering.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    # ---- what is asked afterwards

    def place_of(self, tensor: Tensor) -> StorageRegion | None:
        """Where a tensor lies; None where a step cannot be given it."""
        if type(tensor) not in (Tensor, nn.Parameter) or not _on_meta(tensor) or tensor.layout != torch.strided:
            return None
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return None
        storage = self._number(tensor)
        is_all = tensor.numel() * tensor.itemsize == self.bytes_of(storage) and tensor.is_contiguous()
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return StorageRegion(storage, int(tensor.storage_offset()), shape, stride, tensor.dtype, is_all)

    def bytes_of(self, storage: int) -> int:
        """The size of a storage."""
        return self._storages[storage].nbytes()

    def writes_to(self, tensor: Tensor) -> list[RecordedOperation]:
        """What wrote into a tensor, or into one that shares its storage, in order."""
        if is_lazy(tensor):
            return []
        storage = self._number(tensor)
        return [step for step in self._steps[storage] if any(place.storage == storage for place in step.written)]

    def steps_to(self, place: StorageRegion) -> tuple[RecordedOperation, ...] | None:
        """The steps that the values at a place come from, in order; None where they cannot be done again."""
        found: dict[int, RecordedOperation] = {}
        seen: set[tuple[int, int]] = set()
        todo = [(place.storage, self._count)]
        while todo:
            storage, before = todo.pop()
            if (storage, before) in seen:
                continue
            seen.add((storage, before))
            for step in reversed(self._steps[storage]):
                if step.number >= before:
                    continue
                if not step.repeatable:
                    return None
                found[step.number] = step
                todo += [(place.storage, step.number) for place in step.read if place.storage != storage]
                if step.replaces(storage):
                    break
        own = any(place.storage in _storages(step) for step in found.values())
        return tuple(found[number] for number in sorted(found)) if own else None

    # ---- what is written down

    def add(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, written: list[Tensor], result: Any = None
    ) -> None:
        """One operation that is over; tensors of its result that have unknown storages were made by it."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = {id(tensor): self.place_of(tensor) for tensor in given}
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        made = tuple(self.place_of(leaf) if self._is_new(leaf) else None for leaf in results)
        into = tuple(place for tensor in written if (place := places[id(tensor)]) is not None)
        for tensor in written:
            if places[id(tensor)] is None:
                self.doubt(tensor)
        packet = getattr(function, "overloadpacket", function)
        if packet in _ALLOCATES or not (into or any(made)):
            return
        if not given:  # the defaults may be others when it is done again
            defaults = {"device": results[0].device, "dtype": results[0].dtype}
            kwargs = kwargs | {key: value for key, value in defaults.items() if _takes(function, key)}
        own_generator = any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs)))
        args, kwargs = tree_map(lambda leaf: places[id(leaf)] if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        step = RecordedOperation(
            self._next(),
            function,
            args,
            kwargs,
            written=into,
            made=made,
            repeatable=None not in places.values() and packet not in _EXCHANGES and not own_generator,
            draws=isinstance(function, InitFunction)
            or torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()),
        )
        for storage in _storages(step):
            self._steps[storage].append(step)

    def doubt(self, tensor: Tensor) -> None:
        """Something may be left undone to a tensor, since it has no values."""
        if _on_meta(tensor) and not is_lazy(tensor):
            self._steps[self._number(tensor)].append(RecordedOperation(self._next(), None, repeatable=False))

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _is_new(self, tensor: Tensor) -> bool:
        return _on_meta(tensor) and storage_key(tensor) not in self._numbers and self._register(tensor)

    def _number(self, tensor: Tensor) -> int:
        """Of a tensor's storage. One that nothing here has made has values from outside."""
        key = storage_key(tensor)  # `data_ptr`, the public number, is 0 for all of them on the meta device
        if key not in self._numbers:
            self._register(tensor)
            self.doubt(tensor)
        return self._numbers[key]

    def _register(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        self._numbers[storage_key(storage)] = len(self._storages)
        self._storages.append(storage)
        self._steps.append([])
        return True


class _RecordOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a record all operations on tensors."""

    def __init__(self, record: ConstructionRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled in here, and to tell the compiler so would load it ([Note: dynamo is loaded late],
        `plait/optim/optimizers.py`)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = args[0] if func in _DRAWS and _on_meta(args[0]) else func(*args, **kwargs)
        written = []
        for index, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        self._record.add(func, args, kwargs, written=written, result=result)
        return result


class _Calls(TorchFunctionMode):
    """Shows a record the calls that end in no operation."""

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
            asking = sys._getframe(1)
            if asking.f_code in _WHOLE:
                _, *names = inspect.getargs(asking.f_code).args
                given = {name: asking.f_locals[name] for name in names}
                self._record.add(_WHOLE[asking.f_code], args, given, written=[args[0]])
            else:
                self._record.doubt(args[0])
        return result


def _takes(function: Any, name: str) -> bool:
    return not has_schema(function) or any(argument.name == name for argument in schema_of(function).arguments)


def _storages(step: RecordedOperation) -> set[int]:
    return {place.storage for place in (*step.written, *step.made) if place is not None}


def _on_meta(tensor: Tensor) -> bool:
    """As `is_meta` says, which is watched here."""
    return tensor.device.type == "meta"


Origin = tuple[StorageRegion, tuple[RecordedOperation, ...]]
"""Where a tensor lay, and how its values came there."""


class Replay:
    """Gives one module of a model after another the values that its constructor gave it."""

    def __init__(
        self, model: nn.Module, origins: Mapping[str, Mapping[str, Origin]], built: ConstructionRecord
    ) -> None:
        """`origins`: of the tensors of each module, by name."""
        self._origins, self._built = origins, built
        self._names = {id(module): name for name, module in model.named_modules()}

    def onto(self, model: nn.Module) -> Replay:
        """The same for another model whose modules have the same names, such as a part of the first."""
        return Replay(model, self._origins, self._built)

    def __call__(self, module: nn.Module) -> None:
        """Fill the parameters and buffers of one module, those that have memory."""
        known = self._origins.get(self._names[id(module)], {})
        targets = {key: tensor.detach() for key, tensor in direct_tensors(module).items() if key in known}
        targets = {key: tensor for key, tensor in targets.items() if not tensor.is_meta}
        if targets:
            with torch.no_grad():
                self._fill(targets, {key: known[key] for key in targets})

    def _fill(self, targets: Mapping[str, Tensor], origins: Mapping[str, Origin]) -> None:
        steps = {step.number: step for _, own in origins.values() for step in own}
        made = {place.storage for step in steps.values() for place in step.made if place is not None}
        room = _RealStorages(self._built, next(iter(targets.values())).device)
        for key, (place, _) in origins.items():
            target = targets[key]
            assert target.shape == place.shape, f"{key} was built as {place.shape} and is {tuple(target.shape)}"
            # What is only ever written to is written where it is to be, and takes no memory beside that.
            if place.is_all and place.storage not in made and target.dtype == place.dtype and target.is_contiguous():
                room.flat[place.storage] = target.view(-1)
        finished = set(room.flat)
        for number in sorted(steps):
            room.do(steps[number])
        for key, (place, _) in origins.items():
            if place.storage not in finished:
                targets[key].copy_(room.at(place))


class _RealStorages:
    """Storages on a real device, in the place of those that were recorded."""

    def __init__(self, built: ConstructionRecord, device: torch.device) -> None:
        self._built, self._device = built, device
        self.flat: dict[int, Tensor] = {}
        """All elements of a storage, by its number."""

    def do(self, step: RecordedOperation) -> None:
        """One step again, with everything that it makes."""
        assert step.function is not None
        args, kwargs = tree_map(self._real, (step.args, dict(step.kwargs)))
        answer = step.function(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]
        for result, place in zip(results, step.made, strict=False):
            if place is not None:
                self._put(place, result)

    def _put(self, place: StorageRegion, tensor: Tensor) -> None:
        """Let a tensor be what lies at a place; it is copied only if it lies otherwise in its own storage."""
        bytes_ = self._built.bytes_of(place.storage)
        alike = tensor.stride() == place.stride and tensor.storage_offset() == place.offset == 0
        if alike and tensor.untyped_storage().nbytes() == bytes_:
            self.flat[place.storage] = tensor.as_strided((bytes_ // place.dtype.itemsize,), (1,))
        else:
            self.at(place).copy_(tensor)

    def at(self, place: StorageRegion) -> Tensor:
        """The tensor at a place."""
        if place.storage not in self.flat:
            count = self._built.bytes_of(place.storage) // place.dtype.itemsize
            self.flat[place.storage] = torch.empty(count, dtype=place.dtype, device=self._device)
        return self.flat[place.storage].view(place.dtype).as_strided(place.shape, place.stride, place.offset)

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return self._device
        return self.at(leaf) if isinstance(leaf, StorageRegion) else leaf


def find_replay(model: nn.Module, built: ConstructionRecord) -> Replay | None:
    """What does again what a model's constructor did, or None where that cannot be done.

    See [Note: the constructor is the initializer].
    """
    origins: dict[str, dict[str, Origin]] = {}
    drawn_for: dict[int, int] = {}
    owners: dict[int, int] = {}
    lies_at: dict[int, int] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, tensor in direct_tensors(module).items():
            place = built.place_of(tensor)
            steps = None if place is None else built.steps_to(place)
            if place is None or steps is None:
                return None
            origins.setdefault(name, {})[key] = place, steps
            owner = id(module)
            if isinstance(tensor, nn.Parameter):
                owner = owners.setdefault(id(tensor), owner)  # a tied one is made for the first that has it
                if lies_at.setdefault(place.storage, id(tensor)) != id(tensor):
                    return None
            if any(step.draws and drawn_for.setdefault(step.number, owner) != owner for step in steps):
                return None
    return Replay(model, origins, built)


def direct_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers, without those of the modules in it."""
    held = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in held.items() if tensor is not None}
