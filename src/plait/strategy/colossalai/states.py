"""Where ColossalAI keeps weights and optimizer states: one class for each of its ways.

All give and take wholes; see [Note: states by way of wholes], `foreign/wholes.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from plait.strategy.foreign.states import PlainStates, States
from plait.torch_internals import flat_let_go, flat_place
from plait.world import all_gather_flat


def states_of(model: Any, optimizer: Any) -> States:
    """The states behind a boosted model and its optimizer."""
    if hasattr(optimizer, "working_to_master_param"):
        return SplitStates(optimizer)
    if hasattr(optimizer, "chunk_manager"):
        return ChunkStates(model, optimizer)
    if type(model).__name__ == "TorchFSDPModel":
        return FlatParamStates(model.module, optimizer)
    masters = getattr(optimizer, "working_to_master_map", None) or {}
    return PlainStates(optimizer.optim, {id(param): master for param, master in masters.items()})


class SplitStates(States):
    """ZeRO 1 and 2: each parameter is cut flat into equal stretches, the last one filled up."""

    def __init__(self, wrapper: Any) -> None:
        super().__init__(wrapper.optim)
        self._wrapper = wrapper

    def home(self, param: Any) -> Tensor:
        """This rank's stretch of the fp32 weights."""
        home: Tensor = self._wrapper.working_to_master_param[id(param)]
        return home

    def read(self, param: Any, key: str | None) -> Tensor:
        """The stretches of all ranks, without what fills up the last."""
        mine: Tensor = self.home(param) if key is None else self.state(param)[key]
        if mine.ndim == 0:
            return mine
        mine = mine.detach().to(param.device).contiguous()
        every = mine.new_empty(mine.numel() * dist.get_world_size())
        all_gather_flat(every, mine)
        return every[: param.numel()].view(param.shape)

    def write(self, param: Any, key: str | None, whole: Tensor) -> None:
        """This rank's stretch of it, and what computes."""
        mine: Tensor = self.home(param) if key is None else self.state(param)[key]
        if mine.ndim == 0:
            mine.copy_(whole)
            return
        size = mine.numel()
        filled = F.pad(whole.flatten(), (0, size * dist.get_world_size() - whole.numel()))
        mine.data.copy_(filled.narrow(0, size * dist.get_rank(), size))
        if key is None:
            self.write_computing(param, whole)


class ScatteredStates(States):
    """Of a parameter some ranks have a part, and others nothing at all, not even the names of its states."""

    def _ranks_of(self, param: Any) -> dict[str, int]:
        """Each state's name and number of dimensions, as ranks know it that have a part."""
        mine = {key: getattr(value, "ndim", 0) for key, value in self.state(param).items()}
        found: dict[str, int] = first_of(mine or None) or {}
        return found

    def keys(self, param: Any) -> list[str]:
        """The same on every rank."""
        return list(self._ranks_of(param))


def first_of(value: Any) -> Any:
    """The first rank's value that is not None, on every rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return next((each for each in found if each is not None), None)


class FlatParamStates(ScatteredStates):
    """`torch_fsdp`: parameters are stretches of one flat vector."""

    def __init__(self, model: Any, wrapper: Any) -> None:
        super().__init__(wrapper.optim)
        self._model = model

    def home(self, param: Any) -> Tensor:
        """The stretch itself."""
        home: Tensor = param
        return home

    def _place(self, param: Any) -> tuple[Any, torch.Size]:
        return flat_place(self._model, param)  # the plugin makes one unit of the whole model

    def read(self, param: Any, key: str | None) -> Tensor:
        """The stretches of all ranks; each has its own, or none."""
        mine: Tensor | None = param if key is None else self.state(param).get(key)
        if key is not None and self._ranks_of(param)[key] == 0:
            return torch.tensor(first_of(None if mine is None else float(mine)))
        info, shape = self._place(param)
        whole = torch.zeros(shape.numel(), device=param.device)
        if info.in_shard and mine is not None:
            whole.narrow(0, info.intra_param_start_idx, info.numel_in_shard).copy_(mine.detach().flatten())
        dist.all_reduce(whole)
        return whole.view(shape)

    def write(self, param: Any, key: str | None, whole: Tensor) -> None:
        """This rank's stretch of it."""
        mine: Tensor | None = param if key is None else self.state(param).get(key)
        if mine is None:
            return
        if key is not None and mine.ndim == 0:
            mine.copy_(whole)
            return
        info, _ = self._place(param)
        if info.in_shard:
            part = whole.flatten().narrow(0, info.intra_param_start_idx, info.numel_in_shard)
            mine.data.copy_(part.view(mine.shape))

    def write_computing(self, param: Any, whole: Tensor) -> None:
        """The parameter has one place, for the fp32 weights and for computing."""
        self.write(param, None, whole)

    def allocate(self, param: Any, key: str, shape: torch.Size, dtype: torch.dtype, *, whole: bool) -> None:
        """Make room where there is a part; elsewhere the optimizer never steps, and its count would stand still."""
        if self._place(param)[0].in_shard:
            super().allocate(param, key, shape, dtype, whole=whole)

    def publish(self) -> None:
        """Let go of the whole that a forward pass without a backward pass leaves behind; it would be used again."""
        flat_let_go(self._model)


class ChunkStates(ScatteredStates):
    """Gemini: parameters lie in chunks, of which ranks have parts; it gathers them itself."""

    def __init__(self, model: Any, wrapper: Any) -> None:
        super().__init__(wrapper.optim)
        self._model = model
        self._wrapper = wrapper
        self._names = {id(param): name for name, param in model.module.named_parameters()}
        self._ids = {id(param): number for number, param in wrapper.id_to_real_params.items()}
        self._written: dict[str, Tensor] = {}

    def home(self, param: Any) -> Tensor:
        """What stands for the parameter in the optimizer; nothing on ranks without a part of it."""
        home: Tensor = self._wrapper.id_to_fake_params.get(self._ids[id(param)], param)
        return home

    def read(self, param: Any, key: str | None) -> Tensor:
        """The whole, which Gemini gathers from its chunks."""
        if key is None:
            found: Tensor = self._model.state_dict(only_rank_0=False)[self._names[id(param)]]
            return found.to(param.device).float()
        number = self._ids[id(param)]
        state = self._wrapper.collect_states(number, only_rank_0=False)[key]
        shape = () if key == "step" else self._wrapper.params_info["id2shape"][number]
        return torch.as_tensor(state, dtype=torch.float32).to(param.device).view(shape)

    def write(self, param: Any, key: str | None, whole: Tensor) -> None:
        """Kept until `publish`, which loads all weights at once; states at once."""
        if key is None:
            self._written[self._names[id(param)]] = whole
        elif self._ids[id(param)] in self._wrapper.id_to_fake_params:
            self._wrapper.load_single_param_states(self._ids[id(param)], {key: whole})

    def allocate(self, param: Any, key: str, shape: torch.Size, dtype: torch.dtype, *, whole: bool) -> None:
        """Gemini makes room as it loads."""
        self.write(param, key, torch.zeros(shape, dtype=dtype, device=param.device))

    def write_computing(self, param: Any, whole: Tensor) -> None:
        """Kept until `publish`, like the trained ones."""
        self.write(param, None, whole)

    def publish(self) -> None:
        """Hand all weights written since the last time to Gemini, which loads them at once."""
        self._model.load_state_dict(self._written, strict=False)
        self._written = {}
