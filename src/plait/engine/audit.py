"""The audit of the first step: is every parameter trained, finite, and equal on the ranks that hold the same of it?

It runs once, when the gradients of the first step are complete and no weight has changed, so that nothing wrong is
trained or saved. Its cost is a few reductions over each tensor, and one all-reduce of a few numbers per parameter.

[Note: what stops a run] What no model can mean stops it: a parameter that requires a gradient and that no optimizer
updates, weights that are not finite, replicas that differ. A gradient that is exactly zero may be meant: a module that
is not used for this data, a gate that begins at zero, an index that is trained in another way. So it is a warning that
names the parameters; those for which a reason is known (an expert without tokens, a product with a weight that is zero)
are left out. Only if nothing of a model that Plait built has a gradient does it stop the run.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.distributed import World, is_sharded, persistent_buffers, to_local
from plait.engine.master_weights import MasterWeights
from plait.errors import ModelError
from plait.torch_internals import foreach_norm

AuditMode = Literal["error", "warn", "strict"]
Kind = Literal["weight", "gradient", "buffer", "non-persistent buffer"]

_CHUNK = 1 << 22
"""How many elements are read at once: the bound of the audit's memory."""
_NO_NUMBER = 1e30
"""Stands for NaN and infinity where replicas are compared."""
_COMPARED = 3
"""How many tensors that differ are looked at closely."""
_ROUNDING = 1e-3
"""By which part of the largest value weights may differ without stopping the run: machines round differently."""
_NOISE = 1e-4
"""Gradients below this part of the largest of all may be nothing but rounding."""
_SHOWN = 6
"""How many names one message lists."""
_EXPERT = re.compile(r"(?P<before>.*experts?)\.\d+\.(?P<after>.*)")
"""The name of a parameter in a list of experts."""


@dataclass(slots=True)
class _Entry:
    """One tensor of this rank. The fields are the same on every rank that has it, except `local` and `index`."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    pieces: int
    """Into how many pieces it is cut; ranks with the same `index` hold the same piece."""
    index: int
    local: Tensor
    """This rank's piece."""

    @property
    def key(self) -> tuple[Kind, str]:
        return self.kind, self.name


@dataclass(frozen=True, slots=True)
class _Table:
    """What all ranks have: the tensors that are compared, and the parameters, in one order."""

    first_slot: Mapping[tuple[Kind, str], int]
    """Kind and name → the slot of the first piece."""
    slots: int
    names: Sequence[str]
    """The parameters, frozen ones included."""
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class _Findings:
    """What is wrong (`errors`), and what may be (`warnings`), as sentences; those of `doubts` are errors if strict."""

    errors: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class Audit:
    """Compares weights, gradients and buffers before the first update of a run; see [Note: what stops a run]."""

    def __init__(
        self,
        model: nn.Module,
        master_weights: MasterWeights,
        optimizer: Optimizer,
        world: World,
        *,
        mode: AuditMode,
        described: bool,
        rounding: float,
        log: Callable[[str], None],
    ) -> None:
        """`described`: Plait built the model from its section, so that no code of the user's made it unusual.

        `rounding`: by which part of its largest value a gradient may differ between ranks that compute the same one.
        """
        self._model = model
        self._master_weights = master_weights
        self._optimizer = optimizer
        self._world = world
        self._mode = mode
        self._described = described
        self._rounding = rounding
        self._log = log
        self._weights_compared = False
        self.note_buffers()

    def note_buffers(self) -> None:
        """Note the buffers as they are: those that a forward pass changes later may differ between ranks."""
        self._noted = {name: _checksum(buffer) for name, buffer in self._buffers()}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that can be compared with those of other ranks."""
        for name, buffer in self._model.named_buffers() if self._world.size > 1 else ():
            if not is_sharded(buffer) and _is_comparable(buffer):
                yield name, buffer

    def run(self, targets: float) -> bool:
        """Check the gradients of a step with so many targets, and, the first time, everything else.

        Call it when they are complete, with the sharded parameters registered. Every rank must call it. Returns whether
        the gradients were conclusive: not if they are not finite, or if the step has no targets. Raises `ModelError`.
        """
        findings = _Findings()
        with torch.no_grad(), self._master_weights.readable():
            conclusive = self._check(findings, targets)
        self._weights_compared = True
        stops = self._mode != "warn"
        errors = [*findings.errors, *(findings.doubts if self._mode == "strict" else ())]
        for text in [
            *findings.warnings,
            *(() if self._mode == "strict" else findings.doubts),
            *(() if stops else errors),
        ]:
            self._log(f"audit of the first step: {text}")
        if errors and stops:
            raise ModelError(
                f"the audit of the first step, before its update: {'; '.join(errors)}. Write train.audit: warn to "
                "train nevertheless"
            )
        return conclusive

    def _check(self, findings: _Findings, targets: float) -> bool:
        entries, gradients = self._entries()
        table = self._table(entries, findings)
        if findings.errors:  # the ranks have different models: nothing can be compared
            return True
        # One vector, of which every rank gets the largest values: two numbers for each slot, a checksum and its
        # complement, and for each parameter whether some rank has found what the rows are called.
        slots, count = table.slots, len(table.names)
        unheld = torch.iinfo(torch.int64).min
        box = torch.full((2 * slots + 8 * count,), unheld, device=self._world.device)
        rows = box[2 * slots :].view(8, count).fill_(0)
        trained, updated, left_out, alive, bad_gradient, read, nonzero, bad_weight = range(8)
        at = {name: index for index, name in enumerate(table.names)}
        compared = {
            table.first_slot[entry.key] + entry.index: entry for entry in entries if entry.key in table.first_slot
        }
        if compared:
            where = torch.tensor(list(compared), device=box.device)
            sums = torch.stack([_checksum(entry.local).to(box.device) for entry in compared.values()])
            box[:slots][where], box[slots : 2 * slots][where] = sums, ~sums
        in_optimizer = {id(tensor) for group in self._optimizer.param_groups for tensor in group["params"]}
        for name, tensor in zip(self._master_weights.names, self._master_weights.updated, strict=True):
            rows[trained, at[name]] = 1
            rows[updated, at[name]] = int(tensor is not None and id(tensor) in in_optimizer)
        for name in self._left_out():
            rows[left_out, at[name]] = 1
        weights = {entry.name: entry.local for entry in entries if entry.kind == "weight"}
        for row, bad, tensors in ((alive, bad_gradient, gradients), (nonzero, bad_weight, weights)):
            largest = _largest(tensors, box.device)
            index = torch.tensor([at[name] for name in tensors], dtype=torch.int64, device=box.device)
            rows[row, index], rows[bad, index] = (largest != 0).long(), (~largest.isfinite()).long()
        rows[read, torch.tensor([at[name] for name in weights], dtype=torch.int64, device=box.device)] = 1
        if self._world.everyone is not None:
            dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._world.everyone)

        flags: list[list[bool]] = rows.bool().tolist()

        def names_with(*columns: int, without: Sequence[int] = ()) -> list[str]:
            wanted = [(row, row not in without) for row in (*columns, *without)]
            return [name for name in table.names if all(flags[row][at[name]] == value for row, value in wanted)]

        if lost := [*names_with(left_out), *names_with(trained, without=[updated, left_out])]:
            findings.errors.append(f"{_listed(lost)}: requires a gradient, and no optimizer updates it")
        if broken := names_with(bad_weight, trained):
            findings.errors.append(f"the weights of {_listed(broken)} are not finite (NaN or infinite)")
        if (broken := names_with(bad_weight, without=[trained])) and not self._weights_compared:
            findings.warnings.append(f"the frozen weights of {_listed(broken)} are not finite (NaN or infinite)")
        no_numbers = names_with(bad_gradient)
        largest, smallest = box[:slots], ~box[slots : 2 * slots]
        different = ((largest != smallest) & (largest != unheld)).nonzero().flatten().tolist()
        conclusive = targets > 0 and not no_numbers
        self._compare(findings, different, compared, table, gradients=not no_numbers)
        if conclusive:
            zero = names_with(read, without=[nonzero])
            self._explain(findings, table, names_with(updated), alive=names_with(alive), zero=zero)
        return conclusive

    # ---- what is compared

    def _entries(self) -> tuple[list[_Entry], dict[str, Tensor]]:
        """Return the tensors of this rank that other ranks may have too, and its gradients by name."""
        layout, master_weights = self._world.layout, self._master_weights
        master_weights.gather_gradients()
        entries: list[_Entry] = []
        gradients: dict[str, Tensor] = {}
        for index, (name, param) in enumerate(zip(master_weights.names, master_weights.params, strict=True)):
            pieces, piece = _piece_of(param)
            entries.append(_Entry(name, "weight", tuple(param.shape), pieces, piece, master_weights.in_memory(index)))
            gradient = master_weights.gradient(index)
            if gradient is not None:
                gradients[name] = to_local(gradient)
                entries.append(_Entry(name, "gradient", tuple(param.shape), pieces, piece, gradients[name]))
        trained = frozenset(master_weights.names)
        for name, param in self._model.named_parameters():
            if name not in trained:
                entries.append(_Entry(name, "weight", tuple(param.shape), *_piece_of(param), to_local(param)))
        # A technique may cut a buffer along these axes; along the others all ranks have the same.
        pieces = layout.tp * layout.ep
        piece = self._world.coordinate("tp") * layout.ep + self._world.coordinate("ep")
        persistent = {name for name, _ in persistent_buffers(self._model)}
        for name, buffer in self._buffers():
            # By their values: not every kernel that changes a running statistic raises its version counter.
            if name in self._noted and torch.equal(_checksum(buffer), self._noted[name]):
                kind: Kind = "buffer" if name in persistent else "non-persistent buffer"
                entries.append(_Entry(name, kind, tuple(buffer.shape), pieces, piece, buffer))
        return [entry for entry in entries if _is_comparable(entry.local)], gradients

    def _left_out(self) -> list[str]:
        """Return the parameters of the model that require a gradient and are not those that were prepared."""
        prepared = {id(param) for param in self._master_weights.params}
        return [
            name for name, param in self._model.named_parameters() if param.requires_grad and id(param) not in prepared
        ]

    def _table(self, entries: Sequence[_Entry], findings: _Findings) -> _Table:
        """Return the order in which all ranks write their numbers; add an error if they have different models."""
        layout = self._world.layout
        mine = [(entry.kind, entry.name, entry.shape, entry.pieces) for entry in entries]
        names = [*self._master_weights.names, *(name for name, _ in self._model.named_parameters())]
        mark = hashlib.sha256(repr((mine, names)).encode()).hexdigest()
        shared = mine, list(dict.fromkeys(names))
        alike = len(set(self._world.gather(mark))) == 1
        everybody = [shared] if alike else self._world.gather(shared)
        pieces: dict[tuple[Kind, str], int] = {}
        shapes: dict[tuple[Kind, str], tuple[int, ...]] = {}
        for rank, (rows, _) in enumerate(everybody):
            for kind, name, shape, cut in rows:
                pieces[kind, name] = max(pieces.get((kind, name), 1), cut)
                if shapes.setdefault((kind, name), shape) != shape:
                    findings.errors.append(f"{name!r} has the shape {shape} on rank {rank}, and another on other ranks")
        holders = Counter(name for _, rank_names in everybody for name in rank_names)
        if layout.pp == layout.ep == layout.tp == 1 and (some := [n for n in holders if holders[n] < len(everybody)]):
            findings.errors.append(f"{_listed(some)} of the parameters are on some ranks only: their models differ")
        first_slot: dict[tuple[Kind, str], int] = {}
        slots = 0
        for key, cut in pieces.items() if self._world.size > 1 else ():
            if self._weights_compared and key[0] != "gradient":
                continue
            # Tied weights may be in several stages. Otherwise a piece of a tensor that is cut over all ranks is alone.
            if len(everybody) > 1 or cut < self._world.size // layout.pp:
                first_slot[key] = slots
                slots += cut
        return _Table(first_slot, slots, list(holders), {name: shape for (_, name), shape in shapes.items()})

    # ---- what is found

    def _compare(
        self,
        findings: _Findings,
        different: Sequence[int],
        compared: Mapping[int, _Entry],
        table: _Table,
        *,
        gradients: bool,
    ) -> None:
        """Measure by how much the replicas in these slots differ, and add that to the findings. A collective.

        `gradients`: those of the gradients too.
        """
        keys, firsts = [*table.first_slot], [*table.first_slot.values()]
        slot_of: dict[tuple[Kind, str], int] = {}
        for slot in different:
            key = keys[bisect_right(firsts, slot) - 1]
            if gradients or key[0] != "gradient":
                slot_of.setdefault(key, slot)
        if not slot_of:
            return
        mine = [compared.get(slot) for slot in slot_of.values()]
        sizes = torch.tensor([0 if entry is None else entry.local.numel() for entry in mine], device=self._world.device)
        local_gradients = {entry.name: entry.local for entry in compared.values() if entry.kind == "gradient"}
        largest = torch.zeros(1, device=sizes.device)
        if gradients and local_gradients:
            largest = _largest(local_gradients, sizes.device).amax(0, keepdim=True)
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=self._world.everyone)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._world.everyone)
        apart: dict[tuple[Kind, str], tuple[float, _Entry | None]] = {}
        for (kind, name), entry, numel in zip(slot_of, mine, sizes.tolist(), strict=True):
            # What is zero but for rounding differs by all of itself.
            floor = float(largest) * _NOISE if kind == "gradient" else 0.0
            distance = self._distance(None if entry is None else entry.local, numel, floor)
            if distance > (self._rounding if kind == "gradient" else 0.0):
                apart[kind, name] = distance, entry
        for (kind, name), (distance, entry) in [*apart.items()][:_COMPARED]:
            sums = self._world.gather(None if entry is None else int(_checksum(entry.local)))
            ranks = {rank: checksum for rank, checksum in enumerate(sums) if checksum is not None}
            (usual, _), *_ = Counter(ranks.values()).most_common(1)
            odd = [str(rank) for rank, checksum in ranks.items() if checksum != usual]
            more = len(apart) - _COMPARED
            text = (
                f"the {kind} {name!r} is not the same on the {len(ranks)} ranks that should have equal copies: on rank "
                f"{_listed(odd)} it is off by {distance:.1e} of its largest value"
                f"{f' ({more} more tensors differ)' if more > 0 else ''}"
            )
            if kind == "gradient" and self._world.layout.tp > 1:
                text += "; strategy.tensor.plan may have no style for its module: write one, or strategy.layout.tp: 1"
            meant = kind == "non-persistent buffer" and not self._described
            doubtful = meant or (kind != "gradient" and distance <= _ROUNDING)
            (findings.warnings if doubtful else findings.errors).append(text)

    def _distance(self, local: Tensor | None, numel: int, floor: float) -> float:
        """Return the largest difference between the ranks' tensors, as a part of their largest value, or of `floor`."""
        apart, largest = 0.0, floor
        for begin in range(0, numel, _CHUNK):
            size = min(_CHUNK, numel - begin)
            limits = torch.full((2, size), -torch.inf, dtype=torch.float32, device=self._world.device)
            if local is not None:
                chunk = local.reshape(-1)[begin : begin + size]
                values = (chunk.abs() if chunk.is_complex() else chunk).to(limits)
                values = values.nan_to_num(_NO_NUMBER, _NO_NUMBER, -_NO_NUMBER)
                limits[0], limits[1] = values, -values
            dist.all_reduce(limits, op=dist.ReduceOp.MAX, group=self._world.everyone)
            apart = max(apart, float((limits[0] + limits[1]).max()))
            largest = max(largest, float(limits.max()))
        return apart / largest if largest else apart

    def _explain(
        self, findings: _Findings, table: _Table, trained: Sequence[str], *, alive: Sequence[str], zero: Sequence[str]
    ) -> None:
        """Add the parameters without a gradient for which no reason is known to the findings."""
        used = set(alive)
        gates = [scope for name in zero if (scope := _scope_of_gate(name, table.shapes[name])) is not None]
        layers = {_without_number(name) for name in used}

        def is_explained(name: str) -> bool:
            if _EXPERT.fullmatch(name) and _without_number(name) in layers:
                return True  # an expert that no token was sent to, beside others
            return any(name.startswith(scope) for scope in gates)

        silent = [name for name in trained if name not in used]
        unexplained = [name for name in silent if not is_explained(name)]
        if not unexplained:
            return
        text = (
            f"{len(unexplained)} of {len(trained)} trained parameters have no gradient, or one of zeros: "
            f"{_listed(_modules(unexplained, trained))}. The loss does not depend on them: this data or objective does "
            "not use their module, or its output is detached or masked; freeze what should not be trained"
        )
        nothing = len(unexplained) == len(trained)
        (findings.errors if nothing and self._described else findings.doubts).append(text)


def _piece_of(param: Tensor) -> tuple[int, int]:
    """Return into how many pieces a parameter is cut, and which of them this rank has."""
    pieces, index = 1, 0
    if is_sharded(param):
        coordinate = param.device_mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(param.placements):
            if not placement.is_replicate():
                size = param.device_mesh.size(axis)
                pieces, index = pieces * size, index * size + coordinate[axis]
    return pieces, index


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksum(tensor: Tensor) -> Tensor:
    """Return a number that depends on every bit of a tensor and on where it is."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.reshape(-1)
    flat = flat.view(_BITS[flat.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for chunk in torch.split(flat, _CHUNK):
        for start in range(4):  # a sum over all would be the same if two elements were exchanged
            total = total * 1_000_003 + chunk[start::4].sum(dtype=torch.int64)
    return total


def _largest(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Return the largest absolute value of each tensor: 0 for an empty one, 1 for one of integers or 8-bit floats."""
    largest = torch.zeros(len(tensors), device=device)
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(tensors.values()):
        if tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1):
            if tensor.numel():
                alike.setdefault((tensor.device, tensor.dtype), []).append((index, tensor))
        else:
            largest[index] = 1.0
    for members in alike.values():
        where = torch.tensor([index for index, _ in members], device=device)
        largest[where] = torch.stack(foreach_norm([tensor for _, tensor in members], torch.inf)).to(largest)
    return largest


def _is_comparable(tensor: Tensor) -> bool:
    """Whether a tensor's bits can be read: not if it is offloaded, or of a layout of its own."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.itemsize not in _BITS:
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.itemsize


def _scope_of_gate(name: str, shape: tuple[int, ...]) -> str | None:
    """Return the prefix of the parameters whose gradient a zero weight may hold back; None if it holds back none.

    A matrix multiplies what the modules beside it compute (the second factor of LoRA, an output layer that begins at
    zero), and a single number (a gate) what its own module computes.
    """
    *path, last = name.split(".")
    if prod(shape) != 1:
        if len(shape) < 2 or last != "weight":
            return None
        factor = next((index for index, module in enumerate(path) if module.startswith("lora_")), len(path) - 1)
        path = path[: max(factor, 0)]
    return "".join(f"{module}." for module in path)


def _without_number(name: str) -> str:
    """Return the name of a parameter of an expert without the number of the expert; other names as they are."""
    return _EXPERT.sub(r"\g<before>.\g<after>", name)


def _modules(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """Return the names, with a module in place of its parameters if all of these are among the names."""
    total, chosen = (Counter(prefix for name in group for prefix in _prefixes(name)) for group in (every, names))
    short: Counter[str] = Counter()
    for name in names:
        short[next((prefix for prefix in _prefixes(name) if total[prefix] == chosen[prefix]), name)] += 1
    return [name if count == 1 else f"{name} ({count} parameters)" for name, count in short.items()]


def _prefixes(name: str) -> list[str]:
    path = name.split(".")
    return [".".join(path[:count]) for count in range(1, len(path))]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
