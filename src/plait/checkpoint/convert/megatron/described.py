"""How a model of `transformers` is made of Megatron's tensors: what every family needs for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from plait.checkpoint.convert.megatron.whole import Whole
from plait.checkpoint.convert.view import Recipe
from plait.errors import CheckpointError


class Described(NamedTuple):
    """A model of `transformers`."""

    config: dict[str, Any]
    """Its `config.json`."""
    recipes: Mapping[str, Recipe]
    """Its tensors, `model.<name>`, each made of Megatron's."""


class Heads(NamedTuple):
    """Attention, whose queries, keys and values Megatron keeps in one matrix: group after group."""

    queries: int
    groups: int
    size: int

    def part(self, which: int) -> Callable[[Tensor], Tensor]:
        """What takes the queries (0), keys (1) or values (2) out of that matrix, or out of its bias."""
        own = self.queries // self.groups
        rows = [slice(0, own), slice(own, own + 1), slice(own + 1, own + 2)][which]

        def take(joined: Tensor) -> Tensor:
            grouped = joined.reshape(self.groups, own + 2, self.size, *joined.shape[1:])
            return grouped[:, rows].flatten(0, 2)

        return take


def heads_of(whole: Whole) -> Heads:
    """As the arguments of the training have them."""
    args = whole.args
    count = args.count("num_attention_heads")
    groups = args.count("num_query_groups") if args("group_query_attention", False) else count
    return Heads(count, groups, args("kv_channels", args.count("hidden_size") // count))


class Recipes:
    """Collected one by one; they know which of several names a tensor has."""

    def __init__(self, whole: Whole) -> None:
        self._whole = whole
        self.all: dict[str, Recipe] = {}

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds such a tensor."""
        return f"model.{name}" in self._whole.entries

    def shape(self, *names: str) -> tuple[int, ...]:
        """That of the tensor with the first of these names that there is."""
        return tuple(self._whole.entries[f"model.{self._found(names)}"].shape)

    def make(self, target: str, *names: str, by: Callable[[Tensor], Tensor] | None = None) -> None:
        """One tensor of `transformers`, from the first of these names that there is."""
        self.all[f"model.{target}"] = (f"model.{self._found(names)}",), by or _same

    def _found(self, names: tuple[str, ...]) -> str:
        for name in names:
            if self.has(name):
                return name
        raise CheckpointError(f"{self._whole.path} lacks {names[0]}; is it the whole model?")


def layers_of(whole: Whole) -> Iterator[tuple[int, str]]:
    """The number of each layer, and how the names of its tensors begin."""
    return ((layer, f"decoder.layers.{layer}.") for layer in range(whole.args.count("num_layers")))


def refuse(whole: Whole, expected: Mapping[str, Any]) -> None:
    """Refuse a model whose arguments say that it computes something else than is known here."""
    for name, value in expected.items():
        found = whole.args(name, value)
        if found != value:
            raise CheckpointError(
                f"{whole.path} was trained with {name} {found!r}, and can be read where that is {value!r}"
            )


def _same(tensor: Tensor) -> Tensor:
    return tensor
