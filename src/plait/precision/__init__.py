"""Number formats: the policy of a run, and loss scaling."""

from plait.precision.policy import DTYPES, FP32_MODULES, Policy, cast_floats, make_policy
from plait.precision.scaler import LossScaler

__all__ = ["DTYPES", "FP32_MODULES", "LossScaler", "Policy", "cast_floats", "make_policy"]
