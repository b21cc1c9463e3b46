"""Number formats: the policy of a run, products in 8 bits, and loss scaling."""

from plait.precision.earlier import EarlierScales
from plait.precision.fp8 import Fp8Linear, apply_fp8, scale_by_earlier_steps
from plait.precision.policy import DTYPES, FP32_MODULES, Policy, cast_floats, make_policy
from plait.precision.scaler import LossScaler

__all__ = [
    "DTYPES",
    "FP32_MODULES",
    "EarlierScales",
    "Fp8Linear",
    "LossScaler",
    "Policy",
    "apply_fp8",
    "cast_floats",
    "make_policy",
    "scale_by_earlier_steps",
]
