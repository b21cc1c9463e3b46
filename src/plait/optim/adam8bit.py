"""AdamW with moments in 8 bits: a quarter of the optimizer's memory.

[Note: narrow in training, wide outside] In training a moment is `Packed`: 8-bit codes with a scale per block. In a
checkpoint, and wherever states are compared, moments are fp32 tensors, like AdamW's and under the same names. A
checkpoint unpacks them some rows at a time, see `plait.checkpoint.DeferredTensor`; `unpack` unpacks all of them.
Packing them again, when a checkpoint is loaded or in the next step, gives the same codes as before. So a run may change
between AdamW and AdamW8bit at any checkpoint, and checkpoint files do not depend on blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from plait.kernels import (
    AdamNumbers,
    Levels,
    Packed,
    adam8bit_step,
    adam_step_plain,
    make_levels,
    pack_into,
    unpack_on_host,
    width_of,
    zeros,
)
from plait.optim.base import PlaitOptimizer, with_gradient

MIN_WIDTH = 64
"""Parameters with shorter rows (biases, norms) keep fp32 moments: scales would take as much memory as packing saves."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW8bit(PlaitOptimizer):
    """AdamW; the moments of matrices are packed block by block, see [Note: blocks lie in rows] in `kernels`.

    Elementwise apart from the scales of blocks. A block is a part of one row, and FSDP shards by rows, so a rank
    updates its rows in the same way as without sharding.
    """

    elementwise = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._levels: dict[torch.device, tuple[Levels, Levels]] = {}

    def _update(self) -> None:
        for group in self.param_groups:
            for param in with_gradient(group):
                assert param.grad is not None
                step = int(self._count(param))
                numbers = AdamNumbers(step, group["lr"], group["betas"], group["eps"], group["weight_decay"])
                if not _is_packed(param):
                    adam_step_plain(
                        numbers, [param], [param.grad], *([self._fp32_moment(param, name)] for name in _MOMENTS)
                    )
                else:
                    adam8bit_step(numbers, param.detach(), param.grad, *self._packed_moments(param))

    def _fp32_moment(self, param: Tensor, name: str) -> Tensor:
        moment = self._moment(param, name)
        if moment.device != param.device:  # it was loaded from a checkpoint
            moment = self.state[param][name] = moment.to(param.device)
        return moment

    def _packed_moments(self, param: Tensor) -> tuple[Packed, Packed]:
        state: dict[str, Any] = self.state[param]
        for name, levels in zip(_MOMENTS, self._levels_on(param.device), strict=True):
            known = state.get(name)
            if not isinstance(known, Packed):
                state[name] = zeros(param, levels)
                if known is not None:  # it was an fp32 tensor, loaded or unpacked
                    pack_into(state[name], known.to(param.device))
        return state[_MOMENTS[0]], state[_MOMENTS[1]]

    def unpack(self) -> None:
        """Replace packed moments by fp32 tensors in host memory: the device may not have enough memory for them."""
        for state in self.state.values():
            for name in _MOMENTS:
                if isinstance(state.get(name), Packed):
                    state[name] = unpack_on_host(state[name])

    def zero_state(self, parameter: Tensor, name: str, dtype: torch.dtype) -> Any:
        """Return a state filled with zeros; packed if this state of this parameter is packed in training."""
        if name not in _MOMENTS or not _is_packed(parameter):
            return super().zero_state(parameter, name, dtype)
        return zeros(parameter, self._levels_on(parameter.device)[_MOMENTS.index(name)])

    def _levels_on(self, device: torch.device) -> tuple[Levels, Levels]:
        if device not in self._levels:
            self._levels[device] = make_levels(device, signed=True), make_levels(device, signed=False)
        return self._levels[device]


def _is_packed(param: Tensor) -> bool:
    return width_of(param) >= MIN_WIDTH and param.is_contiguous()
