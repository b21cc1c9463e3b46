"""Translates a DeepSpeed configuration into a run description, with the outcome of every key."""

from plait.frontends.deepspeed.config.autotuning import search
from plait.frontends.deepspeed.config.read import read_config
from plait.frontends.deepspeed.config.translate import is_deepspeed, translate

__all__ = ["is_deepspeed", "read_config", "search", "translate"]
