"""`deepspeed.runtime.pipe`."""

from plait.frontends.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from plait.frontends.deepspeed.runtime.pipe import module, topology

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec", "module", "topology"]
