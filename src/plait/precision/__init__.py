"""Number formats: the policy of a run, products in 8 bits, and loss scaling."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.precision.fp8 import EarlierScales as EarlierScales
    from plait.precision.fp8 import Fp8Linear as Fp8Linear
    from plait.precision.fp8 import apply_fp8 as apply_fp8
    from plait.precision.fp8 import feed_forward as feed_forward
    from plait.precision.fp8 import go_together as go_together
    from plait.precision.fp8 import scale_by_earlier_steps as scale_by_earlier_steps
    from plait.precision.fp8 import spoken_for as spoken_for
    from plait.precision.fp8 import through_all as through_all
    from plait.precision.policy import DTYPES as DTYPES
    from plait.precision.policy import FP32_MODULES as FP32_MODULES
    from plait.precision.policy import Policy as Policy
    from plait.precision.policy import cast_floats as cast_floats
    from plait.precision.policy import make_policy as make_policy
    from plait.precision.scaler import LossScaler as LossScaler
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "fp8": [
                "EarlierScales",
                "Fp8Linear",
                "apply_fp8",
                "feed_forward",
                "go_together",
                "scale_by_earlier_steps",
                "spoken_for",
                "through_all",
            ],
            "policy": ["DTYPES", "FP32_MODULES", "Policy", "cast_floats", "make_policy"],
            "scaler": ["LossScaler"],
        },
    )
