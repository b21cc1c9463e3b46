"""Adam and AdamW in one kernel that also casts: it reads gradients of any dtype, and writes fp32 master weights and
the bf16 or fp16 weights that the model computes with (the *rounded* weights)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam
from torch.optim.optimizer import ParamsT

from plait.kernels import AdamNumbers, Tables, WeightPointers, adam_many


class OnePassAdam(Adam):
    """torch's Adam with a Triton step: the same states, and the same numbers up to rounding.

    After `round_into`, it also writes the model's bf16 or fp16 weights, and reads their gradients without a cast.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool,
    ) -> None:
        """`decoupled`: AdamW's weight decay; else Adam's, which is added to the gradient."""
        super().__init__(params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=decoupled)
        self._rounded: dict[Tensor, Tensor] = {}
        self._tables: defaultdict[int, Tables] = defaultdict(Tables)

    @property
    def publishes(self) -> bool:
        """Whether a step also writes the model's bf16 or fp16 weights (`round_into`)."""
        return bool(self._rounded)

    def round_into(self, outputs: Mapping[Tensor, Tensor]) -> None:
        """From now on, also write each updated parameter to its output, in the output's dtype.

        A parameter that has no gradient itself is updated with the gradient of its output.
        """
        self._rounded = dict(outputs)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters; `closure`, if given, computes the gradients first, and its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            entries, steps = self._entries(group)
            numbers = AdamNumbers(
                1,
                float(group["lr"]),
                group["betas"],
                group["eps"],
                group["weight_decay"],
                decoupled=group["decoupled_weight_decay"],
            )
            tables = self._tables[number]
            adam_many(numbers, entries, steps, scale=self.grad_scale, found_inf=self.found_inf, tables=tables)
        return loss

    def _entries(self, group: dict[str, Any]) -> tuple[list[WeightPointers], list[Tensor]]:
        entries: list[WeightPointers] = []
        steps: list[Tensor] = []
        for param in group["params"]:
            output = self._rounded.get(param)
            grad = param.grad if param.grad is not None or output is None else output.grad
            if grad is None:
                continue
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            if grad.stride() != param.stride():
                grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
            entries.append(WeightPointers(param, grad, state["exp_avg"], state["exp_avg_sq"], output))
            steps.append(state["step"])
        return entries, steps


def supports_one_pass(tensor: Tensor) -> bool:
    """Whether the kernel supports a weight: fp32, bf16 or fp16, and contiguous (or channels_last)."""
    dense = tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
    return dense and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
