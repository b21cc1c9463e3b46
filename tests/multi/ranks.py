"""The rank pool of `plait.testing`, under the name by which tests know it."""

from plait.testing import RankFailedError, RankPool
from plait.testing.ranks import forked

__all__ = ["RankFailedError", "RankPool", "forked"]
