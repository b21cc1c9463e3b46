"""Rows to their experts and back, over the ranks that hold them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.fake_tensors import on_fake_tensors
from plait.parallel.expert.exchange import exchange, exchange_counts, for_own_part, total
from plait.parallel.expert.seats import Seats
from plait.world import is_sharded


def spread_forward(module: nn.Module, compute: Callable[..., Tensor], seats: Seats) -> Callable[..., Tensor]:
    """A forward for `module` whose experts have these `seats`; `compute` is the forward of its class.

    [Note: every rank makes the whole journey]
    Ranks choose differently, and still all of them take part in every exchange, forward and backward: a rank
    that has no rows sends none, and one whose experts nobody chose receives none, and its experts get a gradient
    of zeros. Nothing is skipped, so nobody waits for a rank that had nothing to do.
    """
    signature = inspect.signature(compute)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        _, hidden, index, weights = signature.bind(module, *args, **kwargs).args
        if seats.tp is not None:
            hidden, weights = for_own_part(hidden, seats.tp), for_own_part(weights, seats.tp)
        journey = _Journey(index, seats)
        rows = journey.there(_in_compute_dtype(hidden))
        answers = journey.back(_answers(module, compute, rows, journey))
        weighted: Tensor = answers * weights[..., None]
        answer = weighted.sum(1).to(hidden.dtype)
        return answer if seats.tp is None else total(answer, seats.tp)

    # The sizes of an exchange are data, so a compiled block is interrupted here.
    interrupting: Callable[..., Tensor] = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    return interrupting


class _Journey:
    """The way of one forward's rows: each choice of each token is a row, which goes to its expert and returns."""

    def __init__(self, index: Tensor, seats: Seats) -> None:
        """`index` (tokens, top_k) are the chosen experts; their number itself stands for a choice that was dropped."""
        self._group = seats.ep
        self._shape = index.shape
        ranks, share = seats.senders, seats.share
        chosen, self._order = seats.own(index).flatten().sort(stable=True)
        bounds = torch.searchsorted(chosen, torch.arange(ranks * share + 1, device=index.device))
        sent = bounds.diff().view(ranks, share)
        received = sent if self._group is None else exchange_counts(sent, self._group)
        self._sent, self._received = _on_host(sent, received, index.numel() // seats.sharers)
        own = torch.arange(share, device=index.device).repeat(ranks)
        self.experts = own.repeat_interleave(received.flatten(), output_size=sum(self._received))
        """For each row that arrives, which of this rank's experts it is for."""

    def there(self, hidden: Tensor) -> Tensor:
        """The rows that arrive here, by where they come from."""
        tokens, top_k = self._shape
        # Repeated, then reordered: both have a gradient that adds up in a fixed order.
        rows = hidden[:, None].expand(-1, top_k, -1).reshape(tokens * top_k, hidden.shape[1])
        rows = rows.index_select(0, self._order[: sum(self._sent)])
        return rows if self._group is None else exchange(rows, self._received, self._sent, self._group)

    def back(self, answers: Tensor) -> Tensor:
        """The answers to this rank's tokens (tokens, top_k, dim); zeros for choices that were dropped or not sent."""
        tokens, top_k = self._shape
        if self._group is not None:
            answers = exchange(answers, self._sent, self._received, self._group)
        if dropped := len(self._order) - len(answers):
            answers = F.pad(answers, (0, 0, 0, dropped))
        places = torch.arange(len(self._order), device=answers.device)
        back = torch.empty_like(self._order).scatter(0, self._order, places)
        return answers.index_select(0, back).reshape(tokens, top_k, answers.shape[1])


def _answers(module: nn.Module, compute: Callable[..., Tensor], rows: Tensor, journey: _Journey) -> Tensor:
    """What this rank's experts say to rows that are theirs."""
    local = _Local(module)
    if len(rows) == 0:
        # Not one row: the experts still take part; see [Note: every rank makes the whole journey].
        for stack in local.stacks:
            rows = rows + stack.flatten()[:1].sum() * 0.0
        return rows
    ones = torch.ones(len(rows), 1, dtype=torch.float32, device=rows.device)
    return compute(local, rows, journey.experts[:, None], ones)


class _Local:
    """A module as its own forward sees it, with no experts but this rank's."""

    def __init__(self, module: nn.Module) -> None:
        own = {name: _local(param) for name, param in module.named_parameters(recurse=False)}
        self.__dict__.update(own)
        self.stacks = list(own.values())
        self.num_experts = len(self.stacks[0])
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _local(param: Tensor) -> Tensor:
    assert is_sharded(param)
    return param.to_local()


def _in_compute_dtype(hidden: Tensor) -> Tensor:
    """Autocast would round at the first product; rounded before, only half as much is sent."""
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


def _evenly(sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
    ranks = sent.shape[0]
    even = [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]
    return even, even


@on_fake_tensors(_evenly)
def _on_host(sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """How many rows go to and come from each rank. Waits for the device."""
    sizes = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    return sizes[0], sizes[1]
