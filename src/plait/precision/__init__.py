"""Mixed precision, loss scaling, FP8, and quantized weights in files."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.precision.fp8 import AmaxHistory as AmaxHistory
    from plait.precision.fp8 import Fp8Linear as Fp8Linear
    from plait.precision.fp8 import apply_fp8 as apply_fp8
    from plait.precision.fp8 import apply_linears as apply_linears
    from plait.precision.fp8 import are_fusable as are_fusable
    from plait.precision.fp8 import bypassed_layers as bypassed_layers
    from plait.precision.fp8 import enable_delayed_scaling as enable_delayed_scaling
    from plait.precision.fp8 import feed_forward as feed_forward
    from plait.precision.mixed_precision import DTYPES as DTYPES
    from plait.precision.mixed_precision import FP32_MODULES as FP32_MODULES
    from plait.precision.mixed_precision import LossScaler as LossScaler
    from plait.precision.mixed_precision import Policy as Policy
    from plait.precision.mixed_precision import cast_floats as cast_floats
    from plait.precision.mixed_precision import make_policy as make_policy
    from plait.precision.mixed_precision import map_tensors as map_tensors
    from plait.precision.quantized_files import QuantizedTensor as QuantizedTensor
    from plait.precision.quantized_files import StoredShape as StoredShape
    from plait.precision.quantized_files import quantized_tensors as quantized_tensors
    from plait.torch_internals import AnyBatchNorm as AnyBatchNorm
    from plait.torch_internals import AnyInstanceNorm as AnyInstanceNorm
else:
    from plait.lazy import attach_names

    attach_names(__name__)
