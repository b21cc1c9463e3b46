"""`accelerate.data_loader`: the names of what `prepare` makes of a loader."""

from plait.frontends.accelerate.loader import PreparedLoader as DataLoaderShard
from plait.frontends.accelerate.loader import skip_first_batches
from plait.frontends.accelerate.sharing import SeedableSampler as SeedableRandomSampler

__all__ = ["DataLoaderShard", "SeedableRandomSampler", "skip_first_batches"]
