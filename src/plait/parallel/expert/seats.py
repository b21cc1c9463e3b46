"""Which rank has which experts.

[Note: experts are cut over tp too]
The ranks of `ep` see different tokens, those of `tp` the same ones. Along `tp` nothing has to be sent to an expert:
each rank takes the choices that fall on its own experts, and the answers of all ranks are added up. So a rank of `tp`
has its share of the experts' memory and work, and of what goes over `ep`. Whole experts, not columns of each: their
products stay as large as they were, and a stack stays a plain rectangle, however a model packs its matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plait.world import as_one_axis


@dataclass(frozen=True, slots=True)
class Seats:
    """The experts of one module, evenly in their order over `ep`, and inside a rank of `ep` over `tp`.

    Where they do not divide, the last ranks have fewer, or none.
    """

    experts: int
    mesh: DeviceMesh
    """All ranks that have some, as one axis: that along which stacks are cut."""
    ep: dist.ProcessGroup | None
    """Ranks that see other tokens and have other experts."""
    tp: dist.ProcessGroup | None
    """Ranks that see the same tokens and have other experts."""

    @classmethod
    def on(cls, mesh: DeviceMesh, experts: int) -> Seats:
        """On a mesh of `ep`, of `tp`, or of both in this order."""
        names = mesh.mesh_dim_names or ()
        assert names in (("ep",), ("tp",), ("ep", "tp")), "experts are spread over ep and tp"
        ep, tp = (mesh.get_group(axis) if axis in names else None for axis in ("ep", "tp"))
        return cls(experts, as_one_axis(mesh), ep, tp)

    @property
    def senders(self) -> int:
        """How many ranks exchange rows."""
        return 1 if self.ep is None else self.ep.size()

    @property
    def sharers(self) -> int:
        """How many ranks see the same tokens."""
        return 1 if self.tp is None else self.tp.size()

    @property
    def share(self) -> int:
        """The most experts that one rank has."""
        return -(-self.experts // self.mesh.size())

    def of_rank(self) -> slice:
        """The experts of this rank."""
        first = self.mesh.get_local_rank() * self.share
        return slice(min(first, self.experts), min(first + self.share, self.experts))

    def own(self, index: Tensor) -> Tensor:
        """Choices of experts, counted anew without those that other ranks of `tp` have.

        Each rank of `ep` counts `share`, one after the other; a choice that falls elsewhere, or on no expert, becomes
        the number behind the last.
        """
        if self.tp is None:
            return index
        rank = index // self.share
        here = (rank % self.sharers == self.tp.rank()) & (index < self.experts)
        return (rank // self.sharers * self.share + index % self.share).where(here, self.senders * self.share)
