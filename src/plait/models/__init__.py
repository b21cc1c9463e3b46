"""The models: GPT, Llama, a mixture of experts, ResNet, and those of `transformers`; one file per family.

`build_model` builds the model that the config section `model` describes, on torch's default device; under
`torch.device("meta")` that takes no memory. `plait.models.common.protocol` lists the methods and attributes of a model
that the rest of Plait uses.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.models.common import attention as attention
    from plait.models.common.attention import Attention as Attention
    from plait.models.common.attention import attend as attend
    from plait.models.common.attention import rotary_table as rotary_table
    from plait.models.common.attention import rotate_both as rotate_both
    from plait.models.common.counts import active_params as active_params
    from plait.models.common.losses import LMHead as LMHead
    from plait.models.common.losses import cross_entropy as cross_entropy
    from plait.models.common.protocol import IGNORE_INDEX as IGNORE_INDEX
    from plait.models.common.protocol import LossTerm as LossTerm
    from plait.models.common.weights import Made as Made
    from plait.models.common.weights import Reading as Reading
    from plait.models.common.weights import are_unchanged as are_unchanged
    from plait.models.fused import FusedAttention as FusedAttention
    from plait.models.fused import FusedLlamaBlock as FusedLlamaBlock
    from plait.models.fused import FusedRMSNorm as FusedRMSNorm
    from plait.models.fused import FusedSwiGLU as FusedSwiGLU
    from plait.models.fused import fuse as fuse
    from plait.models.fused import rotate_together as rotate_together
    from plait.models.fused import use_fp8_head as use_fp8_head
    from plait.models.hf import hf_config as hf_config
    from plait.models.hf import load_pretrained as load_pretrained
    from plait.models.hf import made_from_stored as made_from_stored
    from plait.models.llama import Llama as Llama
    from plait.models.llama import LlamaBlock as LlamaBlock
    from plait.models.llama import SwiGLU as SwiGLU
    from plait.models.registry import build_model as build_model
    from plait.models.registry import from_stored as from_stored
    from plait.models.registry import from_transformers as from_transformers
    from plait.models.registry import preset as preset
    from plait.models.registry import to_transformers as to_transformers
    from plait.transformers_internals import overrides as overrides
else:
    from plait.lazy import attach_names

    attach_names(__name__)
