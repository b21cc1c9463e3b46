"""Between the tensor-parallel regions: activations whole on every rank, or split along the sequence.

[Note: where the sequence is split]
Sequence parallelism begins where the first block is entered and ends where the last one is left. Embedding, final
norm and head see whole sequences, so positions, masks and losses are what they always are, whoever computes them,
and so does a pipeline's next stage. Inside, norms, dropout and the residual stream work on parts: a region gathers
at its entry and scatters its sum at its exit, which sends as much as the one all-reduce it replaces.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from plait.errors import ModelError, Problem
from plait.parallel.tensor import moves
from plait.parallel.tensor.dropout import OwnRandom, drops
from plait.parallel.tensor.linear import enter_region
from plait.parallel.tensor.parameters import read_shared
from plait.parallel.tensor.style import PLAN_KEY, SEQUENCE_KEY, Style, around, while_training


class Region(Style):
    """A module, such as attention, whose inside is tensor-parallel: its input is brought in once, for all layers."""

    def problems(self) -> list[Problem]:
        """Each rank has a summand of the gradients in here, so nothing may be left to do whole work."""
        if self.site.split and self._gathers() and drops(self.site.module):
            message = f"{self.site.name!r} puts features together again and draws random numbers (dropout)"
            return [Problem(SEQUENCE_KEY, message, "Set dropout to 0, or leave sequence parallelism off.")]
        names = [key for key, part in self.site.module.named_modules() if part._parameters]
        forgotten = [name for key in names if (name := f"{self.site.name}.{key}".rstrip(".")) not in self._known()]
        if not forgotten:
            return []
        message = f"{', '.join(map(repr, forgotten))}: layers of the region {self.site.name!r} without a word"
        return [Problem(PLAN_KEY, message, "Give each of them a word; `inner` keeps parameters whole.")]

    def _gathers(self) -> bool:
        """Whether all ranks do the same work in between, and so must drop the same."""
        inside = f"{self.site.name}."
        return any(word == "colwise_gather" and name.startswith(inside) for name, word in self.site.words.items())

    def _known(self) -> set[str]:
        """Every module that has a word, or lies in an `inner`, which takes all it holds."""
        words, site = self.site.words, self.site
        held = (
            f"{name}.{key}"
            for name, word in words.items()
            if word == "inner" and name.startswith(f"{site.name}.")
            for key, _ in site.module.get_submodule(name[len(site.name) + 1 :]).named_modules()
        )
        return {name for name, word in words.items() if word not in ("region", "replicate")} | set(held)

    def place(self) -> None:
        """Change the main input, and the random numbers inside."""
        site = self.site
        context = None
        # In a split block all random numbers are a rank's own already.
        if drops(site.module) and not site.split and not self._gathers():
            # Shared work ends in the row-parallel layer, and so do they: what follows it may be dropped out again.
            site.random[site.name] = OwnRandom(site.rank)
            context = while_training(site, site.random[site.name])
        around(site.module, enter=partial(enter_region, site), context=context)


class Block(Style):
    """One layer of the model: the blocks of one list pass the residual stream on to each other."""

    def place(self) -> None:
        """With sequence parallelism, split where the first begins and join where the last ends."""
        site = self.site
        if not site.sequence:
            return
        listed = [name for name, word in site.words.items() if word == "block" and _list(name) == _list(site.name)]
        around(
            site.module,
            enter=self._cut if site.name == listed[0] else None,
            leave=self._join if site.name == listed[-1] else None,
            context=while_training(site, OwnRandom(site.rank)) if drops(site.module) else None,
        )

    def _cut(self, x: Tensor) -> Tensor:
        check_sequence(x.shape[1], self.site.size)
        return moves.cut(x, 1, self.site.group)

    def _join(self, x: Tensor) -> Tensor:
        return moves.join(x, 1, self.site.group)


class Sequence(Style):
    """A norm between regions: on a part of the sequence its parameters' gradients are summands."""

    def place(self) -> None:
        """Repeat the parameters, where the sequence is split; elsewhere there is nothing to do."""
        if self.site.split:
            _use_for_own_part(self)


class Inner(Style):
    """A module inside a region with parameters that all ranks have, such as a norm of each head."""

    def place(self) -> None:
        """Repeat the parameters; each rank's gradients are summands."""
        _use_for_own_part(self)


class WholeSequence(Style):
    """A module that must see all tokens, such as a mixture of experts: all ranks do the same work in it."""

    def problems(self) -> list[Problem]:
        """Its ranks would drop different elements of the same activations."""
        if self.site.split and drops(self.site.module):
            message = f"{self.site.name!r} works on the whole sequence and draws random numbers (dropout, jitter)"
            return [Problem(SEQUENCE_KEY, message, "Set them to 0, or leave sequence parallelism off.")]
        return []

    def place(self) -> None:
        """Join before, cut after."""
        if self.site.split:
            self._rows = 0
            around(self.site.module, enter=self._join, leave=self._cut)

    def _join(self, x: Tensor) -> Tensor:
        joined = moves.join(x, 1, self.site.group)
        self._rows, self._tokens = joined.shape[:2]
        return joined

    def _cut(self, x: Tensor) -> Tensor:
        if x.shape[:2] != (self._rows, self._tokens):  # some answer with the tokens of all rows in a line
            if x.shape[0] != self._rows * self._tokens:
                raise ModelError(
                    f"{self.site.name!r} was given {self._rows} rows of {self._tokens} tokens and answered with shape "
                    f"{tuple(x.shape)}, of which no dimension is the tokens; set {SEQUENCE_KEY}: false"
                )
            x = x.view(self._rows, self._tokens, *x.shape[1:])
        return moves.cut(x, 1, self.site.group)


def check_sequence(length: int, size: int) -> None:
    """Refuse a sequence that the ranks cannot share evenly."""
    if length % size:
        longer = -(-length // size) * size
        raise ModelError(
            f"sequence parallelism over {size} ranks cannot split rows of {length} tokens evenly: make them "
            f"{longer} or {longer - size} tokens long (pad with label -100), or set {SEQUENCE_KEY}: false"
        )


def _use_for_own_part(style: Style) -> None:
    for module in style.site.module.modules():
        for key in list(module._parameters):
            style.site.placed.repeat(module, key)
        read_shared(module, style.site.group)


def _list(name: str) -> str:
    return name.rpartition(".")[0]
