"""How many ranks each mesh axis gets."""

from __future__ import annotations

from dataclasses import dataclass

from plait.config.strategy import StrategyConfig
from plait.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the mesh axes; their product is the number of ranks."""

    dp_replicate: int
    dp_shard: int

    @property
    def data_parallel(self) -> int:
        """Ranks that see different data."""
        return self.dp_replicate * self.dp_shard


def resolve_layout(strategy: StrategyConfig, *, size: int, local_size: int) -> Layout:
    """Fill in the axes that are absent, and refuse sizes that do not multiply to the number of ranks."""
    replicate, shard = strategy.layout.dp_replicate, strategy.layout.dp_shard
    if strategy.stage == 0:
        shard = shard or 1
    elif replicate is None and shard is None:
        hybrid = strategy.sharding is not None and "HYBRID" in strategy.sharding
        # FSDP's hybrid sharding means: shard inside a host, replicate between hosts.
        shard = min(local_size, size) if hybrid else size
    if replicate is None:
        assert shard is not None
        replicate = max(size // shard, 1)
    elif shard is None:
        shard = max(size // replicate, 1)
    if replicate * shard != size:
        raise ConfigError(
            Problem(
                "strategy.layout",
                f"dp_replicate × dp_shard = {replicate} × {shard} = {replicate * shard}, but there are {size} ranks",
                f"start {replicate * shard} processes, or leave one axis out to let it take the ranks that are left",
            )
        )
    return Layout(replicate, shard)
