"""`deepspeed.runtime.pipe.module`."""

from plait.frontends.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
