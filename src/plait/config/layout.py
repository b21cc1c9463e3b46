"""How many ranks each mesh axis gets."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod

from plait.config.strategy import StrategyConfig
from plait.config.words import counted
from plait.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the mesh axes, outermost first; their product is the number of ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard * self.ep

    @property
    def replicas(self) -> int:
        """Ranks whose gradients of one dense parameter are added up."""
        return self.data_parallel * self.cp

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(asdict(self).values())

    def sizes(self) -> dict[str, int]:
        """Axis → size, outermost first."""
        return asdict(self)


def least_ranks(strategy: StrategyConfig) -> int:
    """As few ranks as the layout can have: the product of the axes that it fixes."""
    return prod(size or 1 for size in strategy.layout.model_dump().values())


def resolve_layout(strategy: StrategyConfig, *, size: int, local_size: int) -> Layout:
    """Fill in the axes that are absent, and refuse sizes that do not multiply to the number of ranks."""
    wanted = strategy.layout
    replicate, shard = wanted.dp_replicate, wanted.dp_shard
    others = {"pp": wanted.pp, "ep": wanted.ep, "cp": wanted.cp, "tp": wanted.tp}
    model = prod(others.values())
    left = max(size // model, 1)
    if strategy.stage == 0:
        shard = shard or 1
    elif replicate is None and shard is None:
        hybrid = strategy.sharding is not None and "HYBRID" in strategy.sharding
        # FSDP's hybrid sharding means: shard inside a host, replicate between hosts.
        shard = min(max(local_size // model, 1), left) if hybrid else left
    if replicate is None:
        assert shard is not None
        replicate = max(left // shard, 1)
    elif shard is None:
        shard = max(left // replicate, 1)
    layout = Layout(others["pp"], replicate, shard, others["ep"], others["cp"], others["tp"])
    if layout.size != size:
        axes = {axis: n for axis, n in layout.sizes().items() if n > 1 or axis.startswith("dp_")}
        ranks = "there is 1 rank" if size == 1 else f"there are {size} ranks"
        message = f"{' × '.join(axes)} = {' × '.join(map(str, axes.values()))} = {layout.size}, but {ranks}"
        start = f"Start {counted(layout.size, 'process', 'processes')}"
        remedy = f"{start}, or leave one of dp_replicate and dp_shard out: it takes the rest."
        if size % model:
            named = " × ".join(f"{axis} {n}" for axis, n in others.items() if n > 1)
            remedy = f"Start a multiple of {model} processes for {named}, for example {size // model * model or model}."
        raise ConfigError(Problem("strategy.layout", message, remedy))
    return layout
