"""Linear layers whose columns or rows are shared by the ranks.

Also for `transformers`' `Conv1D`, a linear layer with its weight the other way round.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.errors import Problem
from plait.parallel.tensor import moves
from plait.parallel.tensor.parameters import own, shared
from plait.parallel.tensor.style import Site, Style


class LinearStyle(Style):
    """A word for a linear layer."""

    def problems(self) -> list[Problem]:
        """Only a module that is a linear layer and nothing more can be computed in parts."""
        return [] if is_linear(self.site.module) else self.wrong_module("a linear layer")

    def enter(self, x: Tensor) -> Tensor:
        """Bring a layer's input into tensor-parallel work, unless an outer module has done so."""
        return enter_region(self.site, x) if self.site.region is None else x


class Colwise(LinearStyle):
    """Each rank has some of the output features."""

    def problems(self) -> list[Problem]:
        """Features are shared evenly: what follows expects the same number everywhere."""
        wrong = super().problems()
        return wrong or self.indivisible("output features", out_features(self.site.module))

    def place(self) -> None:
        """Split the weight by output features, and the bias."""
        module = self.site.module
        self.site.placed.split(module, "weight", 0 if _out_first(module) else 1)
        self.site.placed.split(module, "bias", 0)
        module.forward = self._forward

    def _forward(self, x: Tensor) -> Tensor:
        module = self.site.module
        return _multiply(module, self.enter(x), own(module, "weight"), own(module, "bias"))


class ColwiseGather(Colwise):
    """The same, but the output is put together again: for code that needs all features at once."""

    def _forward(self, x: Tensor) -> Tensor:
        return moves.join(super()._forward(x), -1, self.site.group)


class Rowwise(LinearStyle):
    """Each rank has some of the input features, and the output is the sum over ranks."""

    def problems(self) -> list[Problem]:
        """Features are shared evenly, as by the layer before."""
        wrong = super().problems()
        return wrong or self.indivisible("input features", in_features(self.site.module))

    def place(self) -> None:
        """Split the weight by input features. The bias is added once, to the sum."""
        module = self.site.module
        self.site.placed.split(module, "weight", 1 if _out_first(module) else 0)
        if self.site.split:
            self.site.placed.repeat(module, "bias")
        module.forward = self._forward

    def _forward(self, x: Tensor) -> Tensor:
        module = self.site.module
        random = self.site.random.get(self.site.region or "")
        if random is not None:
            random.end()
        y = leave_region(self.site, _multiply(module, x, own(module, "weight"), None))
        # On a part of the sequence each rank has a summand of the bias's gradient; on the whole, all of it.
        bias = shared(module, "bias", self.site.group)
        return y if bias is None else y + bias.to(y.dtype)


class RowwiseSplit(Rowwise):
    """The same, for an input that every rank has whole: each takes its features of it."""

    def _forward(self, x: Tensor) -> Tensor:
        return super()._forward(moves.cut(x, -1, self.site.group))


class Heads(Colwise):
    """The projection to queries: each rank has whole attention heads."""

    def problems(self) -> list[Problem]:
        """There must be as many heads for every rank."""
        wrong = LinearStyle.problems(self) or _no_head_dim(self)
        return wrong or self.indivisible("attention heads", head_count(self.site, self.site.module))


class KvHeads(LinearStyle):
    """The projection to keys or values, which may have fewer heads than there are ranks.

    Where the ranks can share the heads evenly, each has its own. Where not, each rank keeps all of the (small)
    weight, computes the heads that its queries attend to, and the gradients are summed.
    """

    def problems(self) -> list[Problem]:
        """It goes with the one `heads` beside it."""
        wrong = super().problems() or _no_head_dim(self)
        if not wrong and len(self.site.siblings("heads")) != 1:
            wrong = self.wrong_module("a layer that has one `heads` beside it")
        return wrong

    def place(self) -> None:
        """Split the heads, or repeat them."""
        site, module = self.site, self.site.module
        queries = head_count(site, site.siblings("heads")[0])
        heads = head_count(site, module)
        mine = kv_heads_of(site.rank, site.size, queries=queries, heads=heads)
        if hasattr(site.parent, "num_key_value_groups"):  # how `transformers` pairs keys with queries
            setattr(site.parent, "num_key_value_groups", queries // site.size // len(mine))  # noqa: B010
        if heads % site.size == 0:
            Colwise(site).place()
            return
        for key in ("weight", "bias"):
            site.placed.repeat(module, key)
        module.forward = partial(self._forward, mine)

    def _forward(self, mine: list[int], x: Tensor) -> Tensor:
        module, head_dim = self.site.module, _head_dim(self.site)
        weight = shared(module, "weight", self.site.group)
        bias = shared(module, "bias", self.site.group)
        assert weight is not None
        weight = _pick(weight, 0 if _out_first(module) else 1, mine, head_dim)
        bias = None if bias is None else _pick(bias, 0, mine, head_dim)
        return _multiply(module, self.enter(x), weight, bias)


class QkvHeads(LinearStyle):
    """One projection to queries, keys and values beside each other, in equal thirds.

    [Note: a fused projection is stored by input features]
    A rank needs its heads of each third: three separate strips of output features. Checkpoints and sharding know
    parameters as rectangles, so the weight is split by *input* features, and the ranks exchange their pieces before
    the product. That moves 1/ranks of the weight, little beside the activations, and nothing has to know about it.
    """

    def problems(self) -> list[Problem]:
        """Three equal parts of whole heads, and input features that can be split too."""
        wrong = super().problems() or _no_head_dim(self)
        if wrong:
            return wrong
        if out_features(self.site.module) % (3 * _head_dim(self.site)):
            return self.wrong_module("a layer whose output is queries, keys and values of equal size")
        heads = self.indivisible("attention heads", head_count(self.site, self.site.module) // 3)
        return heads or self.indivisible("input features", in_features(self.site.module))

    def place(self) -> None:
        """Split the weight by input features; repeat the bias."""
        site, module = self.site, self.site.module
        site.placed.split(module, "weight", 1 if _out_first(module) else 0)
        site.placed.repeat(module, "bias")
        if hasattr(site.parent, "split_size"):  # where GPT-2 of `transformers` cuts the output
            setattr(site.parent, "split_size", out_features(module) // 3 // site.size)  # noqa: B010
        module.forward = self._forward

    def _forward(self, x: Tensor) -> Tensor:
        site, module = self.site, self.site.module
        weight = own(module, "weight")
        assert weight is not None
        inputs = weight.t() if _out_first(module) else weight
        pieces = inputs.view(len(inputs), 3, site.size, -1).movedim(2, 0)  # (ranks, own inputs, 3, features)
        columns = moves.exchange(pieces, site.group).flatten(0, 1).flatten(1)
        bias = shared(module, "bias", self.site.group)
        if bias is not None:
            bias = bias.view(3, site.size, -1)[:, site.rank].flatten()
        return F.linear(self.enter(x), columns.t(), bias)


def enter_region(site: Site, x: Tensor) -> Tensor:
    """From what the ranks have in common to work that they share."""
    return moves.gather(x, 1, site.group) if site.split else moves.spread(x, site.group)


def leave_region(site: Site, x: Tensor) -> Tensor:
    """From each rank's summand back to what they have in common."""
    return moves.scatter(x, 1, site.group) if site.split else moves.total(x, site.group)


def kv_heads_of(rank: int, size: int, *, queries: int, heads: int) -> list[int]:
    """The key/value heads that one rank's queries attend to, in the order in which it must compute them.

    Attention pairs each key/value head with the same number of queries. Where the rank's queries do not fall so,
    each of them gets a copy of its own.
    """
    count = queries // size
    wanted = [query // (queries // heads) for query in range(rank * count, (rank + 1) * count)]
    distinct = list(dict.fromkeys(wanted))
    even = all(wanted.count(head) * len(distinct) == count for head in distinct)
    return distinct if even else wanted


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes x · W + b and nothing else."""
    return type(module).forward is nn.Linear.forward or _is_conv1d(module)


def in_features(module: nn.Module) -> int:
    """How many numbers a token has before the layer."""
    return int(_weight(module).shape[1 if _out_first(module) else 0])


def out_features(module: nn.Module) -> int:
    """How many numbers a token has after the layer."""
    return int(_weight(module).shape[0 if _out_first(module) else 1])


def head_count(site: Site, module: nn.Module) -> int:
    """How many heads a projection computes."""
    return out_features(module) // _head_dim(site)


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _out_first(module: nn.Module) -> bool:
    return not _is_conv1d(module)


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _multiply(module: nn.Module, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None
    return F.linear(x, weight if _out_first(module) else weight.t(), bias)


def _pick(param: Tensor, dim: int, heads: list[int], head_dim: int) -> Tensor:
    picked = [param.narrow(dim, head * head_dim, head_dim) for head in heads]
    return picked[0] if len(picked) == 1 else torch.cat(picked, dim)


def _head_dim(site: Site) -> int:
    head_dim = site.parent.head_dim
    assert isinstance(head_dim, int)
    return head_dim


def _no_head_dim(style: Style) -> list[Problem]:
    """A problem, where the module around a projection does not say how wide a head is."""
    parent, module = style.site.parent, style.site.module
    head_dim = getattr(parent, "head_dim", None)
    if isinstance(head_dim, int) and out_features(module) % head_dim == 0:
        return []
    return style.wrong_module("a layer inside a module with an attribute `head_dim` that divides its output")
