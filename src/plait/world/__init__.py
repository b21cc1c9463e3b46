"""Ranks, devices, and the one mesh."""

from plait.world.agree import on_main
from plait.world.channel import Channel
from plait.world.collectives import all_gather_flat, reduce_scatter_flat
from plait.world.device import device_in
from plait.world.messages import wait_for
from plait.world.ranks import Ranks, detect_ranks
from plait.world.seeding import make_deterministic, restore_rng_state, rng_state, seed_everything
from plait.world.sharded import is_sharded, local_part, same_kind, settled_part
from plait.world.world import World, as_one_axis, open_world

__all__ = [
    "Channel",
    "Ranks",
    "World",
    "all_gather_flat",
    "as_one_axis",
    "detect_ranks",
    "device_in",
    "is_sharded",
    "local_part",
    "make_deterministic",
    "on_main",
    "open_world",
    "reduce_scatter_flat",
    "restore_rng_state",
    "rng_state",
    "same_kind",
    "seed_everything",
    "settled_part",
    "wait_for",
]
