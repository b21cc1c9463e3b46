"""Choose the layers of a model that a plan simulates, and how many others each of them stands for.

The model is built whole, on the meta device, which takes a second at most; so its own modules say which layers it has,
whatever keys its config has. Layers are alike (of one *kind*) if their classes, their parameters and their plain
settings are. See [Note: a few layers stand for all], `plan/ledger.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from plait.config import WrapConfig
from plait.distributed import find_wrap_units


@dataclass(frozen=True, slots=True)
class MoreLayers:
    """A model with a few layers more than the shortest, of a kind that is left out of it."""

    skipped: frozenset[str]
    """Names of the layers that this model does not have."""
    layers: int
    """How many layers it has."""
    times: int
    """How often the layers that it adds are left out of the shortest model."""


@dataclass(frozen=True, slots=True)
class LayerSample:
    """The models that are simulated in place of one with all layers: the shortest, and those with one kind more."""

    skipped: frozenset[str]
    layers: int
    longer: tuple[MoreLayers, ...]


def sample_layers(
    model: nn.Module, *, among: Collection[str] | None = None, every: int = 1, gathered: bool = False
) -> LayerSample:
    """Return which layers of a model to simulate; without `longer`, all of them.

    `among`: the names of the layers of one pipeline stage; None: all. Layers are left out by groups of `every`.
    `gathered`: weights are gathered while the layer before computes (ZeRO-3), so each kind needs its neighbours too.
    """
    skipped: set[str] = set()
    count = 0
    more: list[tuple[set[str], int]] = []
    for names, kinds in _stacks(model, among):
        count += len(names)
        cut = _best_cut(kinds, every, gathered=gathered)
        if cut is None:
            continue
        by_kind: dict[Hashable, list[tuple[int, int]]] = {}
        for start, end in cut:
            by_kind.setdefault(kinds[start:end], []).append((start, end))
            skipped.update(names[start:end])
        more += [(set(names[items[0][0] : items[0][1]]), len(items)) for items in by_kind.values()]
    shortest = count - len(skipped)
    longer = [MoreLayers(frozenset(skipped - added), shortest + len(added), times) for added, times in more]
    return LayerSample(frozenset(skipped), shortest, tuple(longer))


# The layers of a model, and which of them are alike.


def _stacks(model: nn.Module, among: Collection[str] | None) -> Iterator[tuple[list[str], tuple[Hashable, ...]]]:
    """Yield the lists of layers of a model, each as (names, a value per layer that is equal for equal layers).

    Layers that share parameters with other modules are not in them: they cannot be left out one by one.
    """
    stacks: dict[str, list[tuple[str, nn.Module]]] = {}
    for unit in find_wrap_units(model, WrapConfig()):
        parent = unit.name.rpartition(".")[0]
        is_listed = isinstance(model.get_submodule(parent), nn.ModuleList)
        if is_listed and (among is None or unit.name in among):
            stacks.setdefault(parent, []).append((unit.name, unit.module))
    lists = list(_lists_per_layer(model))
    for parent, layers in stacks.items():
        count = len(model.get_submodule(parent))  # type: ignore[arg-type]
        indices = [int(name.rpartition(".")[2]) for name, _ in layers]
        settings = [dict(_settings(name, module)) for name, module in layers]
        # A layer may know its number, which makes no difference.
        others = {
            key
            for index, attributes in zip(indices, settings, strict=True)
            for key, value in attributes.items()
            if value is True or value != index
        }
        kinds = []
        for index, (_, module), attributes in zip(indices, layers, settings, strict=True):
            listed = tuple(values[index] for values in lists if len(values) == count)
            plain = tuple((key, value) for key, value in attributes.items() if key in others)
            kinds.append((_classes(module), _shapes(module), plain, listed))
        yield [name for name, _ in layers], tuple(kinds)


def _classes(module: nn.Module) -> Hashable:
    # By name: an adapted model gives a module a subclass of its own.
    return tuple((name, type(child).__module__, type(child).__qualname__) for name, child in module.named_modules())


def _shapes(module: nn.Module) -> Hashable:
    return tuple((name, param.shape, param.dtype, param.requires_grad) for name, param in module.named_parameters())


def _settings(layer: str, module: nn.Module) -> Iterator[tuple[str, Hashable]]:
    """Yield the plain attributes of a layer and of its submodules, by name: a window, a kind of attention, a scale."""
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            if isinstance(value, str) and value.startswith(layer):
                yield f"{name}.{key}", value.removeprefix(layer)  # a module may know its name
            elif isinstance(value, int | float | str) and key != "training":
                yield f"{name}.{key}", value


def _lists_per_layer(model: nn.Module) -> Iterator[tuple[Hashable, ...]]:
    """Yield the lists of plain values in the configs of a `transformers` model, some of which have a value per layer.

    Its forward may read them by the number of a layer, such as `layer_types`.
    """
    configs = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
    for config in configs.values():
        for values in getattr(config, "__dict__", {}).values():
            if isinstance(values, list | tuple) and all(isinstance(value, int | float | str) for value in values):
                yield tuple(values)


# Which layers are left out. They are a range of a list, by items of `width` layers: of 1 where the layers of each kind
# may be counted by themselves, or of a period, such as a dense layer and a mixture. What remains at both ends has all
# kinds that are left out, so that the first and the last layer of a kind, where memory is highest, are simulated; and
# an added item has neighbours that it has in the whole model too.


_WIDEST = 16
"""The most layers of a period."""
Item = tuple[int, int]
"""The first of some layers that follow each other, and the one after the last."""


def _best_cut(kinds: tuple[Hashable, ...], every: int, *, gathered: bool) -> list[Item] | None:
    """Return the items to leave out of a list of layers so that the fewest are simulated; None to leave out none."""
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    codes = tuple(numbers[kind] for kind in kinds)
    best, least = None, len(codes)
    for width in range(every, min(_WIDEST, len(codes) // 3) + 1, every):
        for head in range(0, width, every):
            cut = _cut(codes, width, head, least, gathered=gathered)
            if cut is not None:
                best, least = cut
    return best


def _cut(codes: tuple[int, ...], width: int, head: int, least: int, *, gathered: bool) -> tuple[list[Item], int] | None:
    """Return (the items to leave out, how many layers all models have that are simulated) if these are below `least`.

    The items begin at `head`; layers before, and those after the last whole item, are items of other kinds.
    """
    count = (len(codes) - head) // width
    items = [(head + index * width, head + (index + 1) * width) for index in range(count)]
    if head:
        items.insert(0, (0, head))
    if items[-1][1] < len(codes):
        items.append((items[-1][1], len(codes)))
    kinds = [codes[start:end] for start, end in items]
    pairs = set(pairwise(kinds))
    for kept in range(2, len(items) - 1):
        for first in range(1, kept):
            last = len(items) - kept + first
            simulated = len(codes) - items[last - 1][1] + items[first][0]
            if 2 * simulated >= least:
                continue
            left_out = set(kinds[first:last])
            total = simulated + sum(simulated + len(kind) for kind in left_out)
            if total >= least or not left_out <= set(kinds[:first]) & set(kinds[last:]):
                continue
            before, after = kinds[first - 1], kinds[last]
            fits = (before, after) in pairs and all({(before, k), (k, after)} <= pairs for k in left_out)
            if fits and gathered:
                fits = set(pairwise(kinds[first - 1 : last + 1])) <= set(pairwise(kinds[:first]))
            if fits:
                return items[first:last], total
    return None


# A model without some of its layers.


class SkippedLayer(nn.Module):
    """Stands for a layer that is not simulated: it returns its input, and has that layer's plain attributes."""

    _before: LastOutput

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument; with what the layer before returned beside it, where that returned a tuple."""
        hidden = args[0] if args else next(iter(kwargs.values()))
        return (hidden, *self._before.others) if self._before.others is not None else hidden


class LastOutput:
    """What the last simulated layer before a skipped one returned beside the hidden states."""

    others: tuple[Any, ...] | None = None

    def saw(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Keep it; None if the layer returned nothing else. A forward hook of that layer."""
        self.others = output[1:] if isinstance(output, tuple) else None


def skip_layers(model: nn.Module, names: Collection[str]) -> nn.Module:
    """Replace layers of a model, in place, by modules that return their input; return the model."""
    outputs: dict[str, LastOutput] = {}
    for name, module in list(model.named_modules()):
        if name not in names:
            continue
        parent, _, index = name.rpartition(".")
        stack: Any = model.get_submodule(parent)
        if parent not in outputs:
            outputs[parent] = LastOutput()
            stack[int(index) - 1].register_forward_hook(outputs[parent].saw)
        stack[int(index)] = _skipped(module, outputs[parent])
    return model


def _skipped(module: nn.Module, before: LastOutput) -> SkippedLayer:
    skipped = SkippedLayer()
    fresh = vars(skipped).keys()
    vars(skipped).update((key, value) for key, value in vars(module).items() if key not in fresh)
    skipped._before = before
    return skipped


def without_layers(build: Callable[[], nn.Module], names: Collection[str]) -> Callable[[], nn.Module]:
    """Return a function that builds a model without some layers."""

    def make() -> nn.Module:
        return skip_layers(build(), names)

    return make
