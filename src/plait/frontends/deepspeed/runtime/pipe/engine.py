"""`deepspeed.runtime.pipe.engine`."""

from plait.frontends.deepspeed.pipeline import PipelineEngine

__all__ = ["PipelineEngine"]
