"""How training is spread, in MMEngine's words."""

from plait.frontends.mmengine.strategy.base import BaseStrategy, DDPStrategy, SingleDeviceStrategy
from plait.frontends.mmengine.strategy.colossalai import ColossalAIStrategy
from plait.frontends.mmengine.strategy.deepspeed import DeepSpeedStrategy
from plait.frontends.mmengine.strategy.fsdp import FSDPStrategy

__all__ = [
    "BaseStrategy",
    "ColossalAIStrategy",
    "DDPStrategy",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "SingleDeviceStrategy",
]
