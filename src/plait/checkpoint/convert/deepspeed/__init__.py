"""DeepSpeed's checkpoints, read and written without DeepSpeed."""

from plait.checkpoint.convert.deepspeed.folder import is_deepspeed
from plait.checkpoint.convert.deepspeed.source import DeepSpeedSource
from plait.checkpoint.convert.deepspeed.write import write_deepspeed

__all__ = ["DeepSpeedSource", "is_deepspeed", "write_deepspeed"]
