"""DeepSpeed's configuration in Plait's words, with the outcome of every key."""

from plait.frontends.deepspeed.config.read import read_config
from plait.frontends.deepspeed.config.translate import KEYS, search, translate

__all__ = ["KEYS", "read_config", "search", "translate"]
