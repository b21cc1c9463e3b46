"""`deepspeed.runtime.zero.partition_parameters`."""

from plait.frontends.deepspeed.parameter_links import ZeroParamStatus, is_zero_param
from plait.frontends.deepspeed.zero import GatheredParameters, Init, register_external_parameter

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "is_zero_param", "register_external_parameter"]
