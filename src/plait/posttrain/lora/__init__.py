"""LoRA: adapters beside frozen matrices, and their files."""

from plait.posttrain.lora.adapter import Adapter, read_adapter, save_adapter
from plait.posttrain.lora.attach import AdapterSpec, attach, lora_layers
from plait.posttrain.lora.layer import adapters_off, merge, unmerge

__all__ = [
    "Adapter",
    "AdapterSpec",
    "adapters_off",
    "attach",
    "lora_layers",
    "merge",
    "read_adapter",
    "save_adapter",
    "unmerge",
]
