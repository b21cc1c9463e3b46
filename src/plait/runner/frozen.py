"""The part of a model that is not trained, and that a trainable-only checkpoint leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from plait.checkpoint import Shares, fingerprint, held_pieces
from plait.errors import CheckpointError
from plait.strategy import Engine
from plait.world import Channel


@dataclass(frozen=True, slots=True)
class FrozenPart:
    """Names of tensors, and a number for their values that does not depend on how they are spread."""

    names: frozenset[str]
    fingerprint: str

    @classmethod
    def of(cls, engine: Engine, names: Iterable[str], channel: Channel) -> FrozenPart:
        """Those of the names that are somewhere, as they are now. Every rank must call it.

        Each rank of a pipeline has some of them, and may know no others.
        """
        tensors = engine.state_entries()
        here = sorted(tensors.keys() & set(names))
        held = held_pieces({name: tensors[name] for name in here})
        everywhere = frozenset(name for part in channel.all_gather(here) for name in part)
        return cls(everywhere, fingerprint(Shares(channel).mine(held), channel))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"names": sorted(self.names), "fingerprint": self.fingerprint}


def check_left_out(path: object, saved: Mapping[str, Any], engine: Engine, channel: Channel) -> frozenset[str]:
    """The names that a trainable-only checkpoint leaves out, once it is sure that their values are here.

    Every rank must call it.
    """
    names = frozenset(saved["names"])
    found = FrozenPart.of(engine, names, channel)
    missing = sorted(names - found.names)
    if missing:
        raise CheckpointError(
            f"{path} holds only what was trained, on top of a model with {missing[0]}"
            f"{f' and {len(missing) - 1} more tensors' if len(missing) > 1 else ''}, which this model does not have"
        )
    if found.fingerprint != saved["fingerprint"]:
        raise CheckpointError(
            f"{path} holds only what was trained, and the {len(names)} other tensors of this model are not the ones "
            "it was trained on; start from the same `model` section, weights and `seed` as then"
        )
    return names
