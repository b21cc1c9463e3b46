"""`deepspeed.runtime.zero`, which `deepspeed.zero` is short for."""

from plait.frontends.deepspeed.parameter_links import ZeroParamStatus
from plait.frontends.deepspeed.runtime.zero import partition_parameters, stage3, stage_1_and_2
from plait.frontends.deepspeed.zero import GatheredParameters, Init, register_external_parameter

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
]
