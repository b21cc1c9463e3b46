"""Plait's own kernels; pinned memory, CUDA graphs, and asynchronous file I/O.

Every kernel also has a plain form: a function that computes the same with torch operations. `registry` says for each
operation which of the two runs, and why. `plait.kernels.decode` is a separate package for token generation.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.kernels.adam import AdamNumbers as AdamNumbers
    from plait.kernels.adam import ThreadPool as ThreadPool
    from plait.kernels.adam import adam_step as adam_step
    from plait.kernels.adam import adam_step_plain as adam_step_plain
    from plait.kernels.adam8bit import WORKSPACE_BYTES as WORKSPACE_BYTES
    from plait.kernels.adam8bit import Levels as Levels
    from plait.kernels.adam8bit import Packed as Packed
    from plait.kernels.adam8bit import adam8bit_step as adam8bit_step
    from plait.kernels.adam8bit import make_levels as make_levels
    from plait.kernels.adam8bit import pack_from_host as pack_from_host
    from plait.kernels.adam8bit import pack_into as pack_into
    from plait.kernels.adam8bit import unpack_on_host as unpack_on_host
    from plait.kernels.adam8bit import width_of as width_of
    from plait.kernels.adam8bit import zeros as zeros
    from plait.kernels.cross_entropy import PROB_SCALE as PROB_SCALE
    from plait.kernels.cross_entropy import has_loss_kernels as has_loss_kernels
    from plait.kernels.cross_entropy import logit_grads_triton as logit_grads_triton
    from plait.kernels.cross_entropy import loss_and_grads_triton as loss_and_grads_triton
    from plait.kernels.cross_entropy import row_statistics_triton as row_statistics_triton
    from plait.kernels.cross_entropy import scaled as scaled
    from plait.kernels.cross_entropy import scaled_plain as scaled_plain
    from plait.kernels.cross_entropy import write_fp8_probs as write_fp8_probs
    from plait.kernels.cuda_graphs import capture_graph as capture_graph
    from plait.kernels.cuda_graphs import capture_stream as capture_stream
    from plait.kernels.direct_io import FileQueue as FileQueue
    from plait.kernels.direct_io import FileTransfer as FileTransfer
    from plait.kernels.direct_io import TensorFile as TensorFile
    from plait.kernels.fp8 import CURRENT_SCALES as CURRENT_SCALES
    from plait.kernels.fp8 import E4M3 as E4M3
    from plait.kernels.fp8 import E5M2 as E5M2
    from plait.kernels.fp8 import FORMATS as FORMATS
    from plait.kernels.fp8 import MULTIPLE as MULTIPLE
    from plait.kernels.fp8 import DelayedScales as DelayedScales
    from plait.kernels.fp8 import Fp8Matrix as Fp8Matrix
    from plait.kernels.fp8 import amax_of as amax_of
    from plait.kernels.fp8 import fp8_cast as fp8_cast
    from plait.kernels.fp8 import fp8_linears as fp8_linears
    from plait.kernels.fp8 import scaled_product as scaled_product
    from plait.kernels.fp8_gated import fp8_feed_forward as fp8_feed_forward
    from plait.kernels.fused_adam import Tables as Tables
    from plait.kernels.fused_adam import WeightPointers as WeightPointers
    from plait.kernels.fused_adam import adam_many as adam_many
    from plait.kernels.linears import apply_linears as apply_linears
    from plait.kernels.linears import bypassed_layers as bypassed_layers
    from plait.kernels.linears import feed_forward as feed_forward
    from plait.kernels.linears import is_plain as is_plain
    from plait.kernels.linears import is_untouched as is_untouched
    from plait.kernels.pinned import copy_gbps as copy_gbps
    from plait.kernels.pinned import host_empty as host_empty
    from plait.kernels.pinned import link_gbps as link_gbps
    from plait.kernels.pinned import rounded as rounded
    from plait.kernels.registry import choose_attention as choose_attention
    from plait.kernels.registry import implementation as implementation
    from plait.kernels.rms_norm import add_rms_norm as add_rms_norm
    from plait.kernels.rms_norm import rms_norm as rms_norm
    from plait.kernels.rms_norm import rms_norm_and_input as rms_norm_and_input
    from plait.kernels.rotary import apply_rotary as apply_rotary
    from plait.kernels.rotary import apply_rotary_plain as apply_rotary_plain
    from plait.kernels.swiglu import product_of as product_of
    from plait.kernels.swiglu import swiglu as swiglu
    from plait.kernels.triton import HAS_TRITON as HAS_TRITON
    from plait.kernels.triton import has_kernels as has_kernels
    from plait.kernels.triton import on_device_of as on_device_of
else:
    from plait.lazy import attach_names

    attach_names(__name__)
