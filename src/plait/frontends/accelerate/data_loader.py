"""`accelerate.data_loader`: the names of what `prepare` makes of a loader."""

from plait.frontends.accelerate.loader import PreparedLoader as DataLoaderShard
from plait.frontends.accelerate.loader import SeedableSampler as SeedableRandomSampler
from plait.frontends.accelerate.loader import skip_first_batches

__all__ = ["DataLoaderShard", "SeedableRandomSampler", "skip_first_batches"]
