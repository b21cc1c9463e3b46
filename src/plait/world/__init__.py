"""Ranks, devices, and the one mesh."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.world.agree import on_main as on_main
    from plait.world.channel import Channel as Channel
    from plait.world.collectives import all_gather_flat as all_gather_flat
    from plait.world.collectives import reduce_scatter_flat as reduce_scatter_flat
    from plait.world.device import device_in as device_in
    from plait.world.export import export_ranks as export_ranks
    from plait.world.export import open_group_of_one as open_group_of_one
    from plait.world.fake import ShapesOnly as ShapesOnly
    from plait.world.fake import fake_world as fake_world
    from plait.world.launched import told_by_accelerate as told_by_accelerate
    from plait.world.messages import wait_for as wait_for
    from plait.world.patch import replaced as replaced
    from plait.world.ranks import Ranks as Ranks
    from plait.world.ranks import detect_ranks as detect_ranks
    from plait.world.seeding import make_deterministic as make_deterministic
    from plait.world.seeding import restore_rng_state as restore_rng_state
    from plait.world.seeding import rng_state as rng_state
    from plait.world.seeding import seed_everything as seed_everything
    from plait.world.sharded import is_sharded as is_sharded
    from plait.world.sharded import local_part as local_part
    from plait.world.sharded import same_kind as same_kind
    from plait.world.sharded import settled_part as settled_part
    from plait.world.world import World as World
    from plait.world.world import as_one_axis as as_one_axis
    from plait.world.world import make_mesh as make_mesh
    from plait.world.world import open_world as open_world
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "agree": ["on_main"],
            "channel": ["Channel"],
            "collectives": ["all_gather_flat", "reduce_scatter_flat"],
            "device": ["device_in"],
            "export": ["export_ranks", "open_group_of_one"],
            "fake": ["ShapesOnly", "fake_world"],
            "launched": ["told_by_accelerate"],
            "messages": ["wait_for"],
            "patch": ["replaced"],
            "ranks": ["Ranks", "detect_ranks"],
            "seeding": ["make_deterministic", "restore_rng_state", "rng_state", "seed_everything"],
            "sharded": ["is_sharded", "local_part", "same_kind", "settled_part"],
            "world": ["World", "as_one_axis", "make_mesh", "open_world"],
        },
    )
