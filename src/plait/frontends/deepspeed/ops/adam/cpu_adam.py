"""`deepspeed.ops.adam.cpu_adam`."""

from plait.frontends.deepspeed.ops.adam import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
