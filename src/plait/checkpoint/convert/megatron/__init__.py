"""Checkpoints of Megatron-LM and Megatron Core, read as models of `transformers`."""

from plait.checkpoint.convert.megatron.folder import is_megatron
from plait.checkpoint.convert.megatron.source import open_megatron, without_padding

__all__ = ["is_megatron", "open_megatron", "without_padding"]
