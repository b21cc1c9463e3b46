"""`deepspeed.init_inference`: a model in a smaller dtype, sharded over tensor-parallel ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from plait.config import parse_sections
from plait.distributed import device_from_env, open_world
from plait.errors import ConfigError, Problem
from plait.frontends.deepspeed.accelerator import DEVICE_VARIABLE
from plait.frontends.deepspeed.comm import init_distributed
from plait.frontends.deepspeed.config import read_config
from plait.frontends.deepspeed.config.keys import dtype_name
from plait.frontends.deepspeed.engine import ModuleWrapper
from plait.monitor import encodable
from plait.precision import DTYPES, cast_floats, map_tensors

_UNNEEDED = {
    "replace_with_kernel_inject": "attention is torch's own fused one, in the model as it is",
    "kernel_inject": "attention is torch's own fused one, in the model as it is",
    "replace_method": "nothing is replaced",
    "enable_cuda_graph": "kernels are launched one by one; the results are the same",
    "use_triton": "kernels are torch's own",
    "triton_autotune": "kernels are torch's own",
    "triangular_masking": "the model makes its own mask",
    "tm": "the model makes its own mask",
    "max_out_tokens": "memory is allocated as it is needed",
    "max_tokens": "memory is allocated as it is needed",
    "min_out_tokens": "memory is allocated as it is needed",
    "min_tokens": "memory is allocated as it is needed",
    "return_tuple": "the model's own output is returned",
    "transposed_mode": "weights stay as they are",
    "training_mp_size": "a checkpoint does not depend on the ranks that wrote it",
    "injection_policy": "a model's own plan says how it is sharded",
    "injection_dict": "a model's own plan says how it is sharded",
}


class InferenceEngine(ModuleWrapper):
    """A model for inference. The engine has the attributes of the model, such as `generate`."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self.dtype = dtype
        self.device = device
        self.eval()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the model's output, without gradients; floating-point inputs are cast to the model's dtype."""
        with torch.inference_mode():
            args, named = map_tensors(lambda tensor: tensor.to(self.device), (inputs, kwargs))
            return self.module(*cast_floats(args, self.dtype), **cast_floats(named, self.dtype))


def init_inference(
    model: nn.Module, config: str | os.PathLike[str] | Mapping[str, Any] | None = None, **kwargs: Any
) -> InferenceEngine:
    """Return an engine for inference: the model in `dtype`, sharded over `tp_size` ranks by its tensor-parallel plan.

    `tp_size` is given as `tensor_parallel: {tp_size: n}`. Options that only choose kernels have no effect, and a line
    lists them; quantization, experts, and loading from DeepSpeed's inference checkpoints are refused.
    """
    given = {**({} if config is None else read_config(config)), **kwargs}
    dtype, size = _dtype(given.pop("dtype", torch.float16)), _tensor_parallel_size(given)
    unneeded = [name for name in given if name in _UNNEEDED]
    problems = [
        Problem(f"init_inference({name}=…)", f"{value!r} is not offered", "Leave it out.")
        for name, value in given.items()
        if name not in _UNNEEDED and value not in (None, False, 1, {}, "")
    ]
    if problems:
        raise ConfigError(problems)
    if size > 1:
        init_distributed()
    strategy = {"layout": {"tp": size}} if size > 1 else None
    world = open_world(parse_sections(strategy=strategy, device=device_from_env(DEVICE_VARIABLE)).config)
    mesh = world.submesh("tp")
    model.to(dtype)
    if mesh is not None:
        from plait.distributed import apply_tensor_parallel, copy_from_main

        assert world.everyone is not None
        copy_from_main(model, world.everyone, world.device)
        apply_tensor_parallel(model, mesh)
    model.to(world.device)
    if unneeded and world.is_main:
        lines = (f"plait: init_inference({name}=…) has no meaning here: {_UNNEEDED[name]}" for name in unneeded)
        print(encodable("\n".join(lines), sys.stdout))
    return InferenceEngine(model, dtype, world.device)


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return value
    name = dtype_name(value)
    if name is None:
        remedy = "Write torch.bfloat16, torch.float16 or torch.float32."
        raise ConfigError(Problem("init_inference(dtype=…)", f"{value!r} is not offered", remedy))
    return DTYPES[name]


def _tensor_parallel_size(given: dict[str, Any]) -> int:
    """Return the tensor-parallel size, and remove it from the options; it may have any of its names."""
    size = 1
    for name in ("tensor_parallel", "tp"):
        section = given.pop(name, None) or {}
        others = {key: value for key, value in section.items() if key not in ("tp_size", "enabled", "tp_grain_size")}
        if any(value is not None for value in others.values()):
            message = f"{sorted(others)} are not offered"
            raise ConfigError(Problem(f"init_inference({name}=…)", message, "Write {'tp_size': n}."))
        size = max(size, int(section.get("tp_size", 1)))
    return max(size, int(given.pop("mp_size", 1)))
