"""DeepSpeed's configuration in Plait's words, with the outcome of every key."""

from plait.frontends.deepspeed.config.autotuning import search
from plait.frontends.deepspeed.config.read import read_config
from plait.frontends.deepspeed.config.translate import KEYS, translate

__all__ = ["KEYS", "read_config", "search", "translate"]
