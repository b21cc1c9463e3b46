"""`deepspeed.runtime.zero.partition_parameters`."""

from plait.frontends.deepspeed.status import ZeroParamStatus
from plait.frontends.deepspeed.zero import GatheredParameters, Init, register_external_parameter

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"]
