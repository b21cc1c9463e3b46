"""`deepspeed.runtime.pipe.topology`."""

from plait.frontends.deepspeed.pipe import PipeDataParallelTopology

__all__ = ["PipeDataParallelTopology"]
