"""Weights whose update is computed away from the device: what the optimizer sees of them, and who decides a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from plait.optim import MakeState, norm_of
from plait.parallel import GradientBuckets, Offload
from plait.strategy.native.update import Updater
from plait.strategy.native.views import Views
from plait.world import local_part, settled_part


class OffloadedViews(Views):
    """The optimizer sees tensors in host memory or in files, one for this rank's part of each parameter.

    Gradients come as they are made (`StreamedGradients`), from buckets that sum them over ranks, or, where neither is
    given, from the parameters once they are complete.
    """

    shows_gradients = False

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        store: Offload,
        frozen: Mapping[nn.Parameter, Tensor],
        *,
        streamed: bool,
        buckets: GradientBuckets | None,
    ) -> None:
        self.store = store
        self.frozen = frozen
        self._streamed = streamed
        self.buckets = buckets
        self._gathered = False
        super().__init__(names, params)

    def _make_tensors(self) -> list[nn.Parameter]:
        return self.store.masters

    def gather_gradients(self) -> list[Tensor]:
        """See that all gradients are on their way; they are not for others to touch, so none is returned."""
        if not self._streamed and not self._gathered:
            with torch.no_grad():
                for index, param in enumerate(self.params):
                    self.store.outbox.take(index, self._gradient_now(index, param))
        self._gathered = True
        return []

    def _gradient_now(self, index: int, param: nn.Parameter) -> Tensor:
        if self.buckets is not None:
            return self.buckets.view_of(index)
        return local_part(torch.zeros_like(param)) if param.grad is None else settled_part(param.grad, param)

    @property
    def in_buckets(self) -> bool:
        """Only where parameters are replicated."""
        return self.buckets is not None

    def gradient_of(self, name: str) -> Tensor:
        """This rank's part of a gradient, where it is collected."""
        assert self.buckets is not None
        return self.buckets.view_of(self.names.index(name))

    def gradient(self, index: int) -> Tensor | None:
        """The gradient of this step, while there is one."""
        return self.store.outbox.of(index)

    def clear_gradients(self) -> None:
        """Forget those of a step that was skipped; an update has taken the others."""
        super().clear_gradients()
        self.store.outbox.drop()
        self._gathered = False

    def norms(self) -> list[Tensor]:
        """The norm of each gradient."""
        return self.store.outbox.norms()

    def publish(self) -> None:
        """Bring the model up to date with the masters, which somebody has set."""
        self.store.publish()

    def settle(self) -> None:
        """Wait for the update under way."""
        self.store.settle()

    def publish_frozen(self) -> None:
        """Bring the model up to date with what does not train, wherever its weights live."""
        stream = self.store.stream
        with torch.no_grad():
            for param, whole in self.frozen.items():
                place = None if stream is None else stream.place_of(param)
                if place is None or stream is None:
                    local_part(param).copy_(local_part(whole))
                else:
                    stream.put(place, local_part(whole).to(param.dtype))

    def local(self, index: int) -> Tensor:
        """This rank's part of one tensor; one in a file as memory of the file."""
        return self.store.weight(index)

    def revealed(self) -> AbstractContextManager[None]:
        """Masters and states are ordinary tensors meanwhile."""
        return self.store.revealed()

    def make_room(self, wanted: Mapping[int, Mapping[str, MakeState]]) -> frozenset[int]:
        """Files for the states that a checkpoint is about to fill; returns whose that are."""
        self.store.make_room(wanted)
        return frozenset(index for index in wanted if self.store.in_files(index))


class OffloadedUpdater(Updater):
    """Decides as every updater does, and lets the update go on while training does."""

    _views: OffloadedViews

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stays_on_device = False  # the host must know the norm to begin

    def _norm(self, grads: list[Tensor]) -> float:
        return norm_of(self._views.norms(), self._views.norm_group, self._views.norm_weights)

    def _apply(self, grads: list[Tensor], norm: float, factor: float) -> None:
        self._views.store.begin(self._clipped(norm, factor), self.clip_value)
