"""Norms, rotations and gates, by their twins and, where Triton's interpreter runs, by the kernels; against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from plait.kernels.cross_entropy import scaled
from plait.kernels.linears import gated_down, linears
from plait.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_and_input
from plait.kernels.rotary import apply_rotary
from plait.kernels.swiglu import swiglu
from plait.kernels.triton import interprets

Function = Callable[..., Tensor | tuple[Tensor, ...]]
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def agrees(function: Function, inputs: Sequence[Tensor], dtype: torch.dtype, fixed: Sequence[Tensor] = ()) -> None:
    """Outputs and gradients of a function against those of the same function in float64."""
    found, wanted = (
        _run(function, [t.to(dtype).to(kind, copy=True).requires_grad_() for t in inputs], [t.to(kind) for t in fixed])
        for kind in (dtype, torch.float64)
    )
    for ours, exact in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - exact).abs().max() <= NEAR[dtype] * exact.abs().max().clamp(min=1.0)


def _run(function: Function, inputs: Sequence[Tensor], fixed: Sequence[Tensor]) -> list[Tensor]:
    outputs = function(*inputs, *fixed)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # Gradients that come from what follows have its format, and a pattern of their own.
    ups = [torch.linspace(-1.0, 1.0, y.numel()).view(y.shape).to(inputs[0].dtype) for y in outputs]
    torch.autograd.backward(outputs, ups)
    return [*(y.detach() for y in outputs), *(x.grad for x in inputs if x.grad is not None)]


@DTYPES
@pytest.mark.parametrize("shape", [(3, 5, 48), (520, 1100)], ids=str)
def test_a_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = 1.0 + 0.1 * torch.randn(shape[-1])
    agrees(lambda x, w: rms_norm(x, w, 1e-5), [3.0 * torch.randn(shape), weight], dtype)


@DTYPES
def test_the_norm_of_a_sum_and_the_sum(dtype: torch.dtype) -> None:
    x, y, weight = torch.randn(4, 6, 48), torch.randn(4, 6, 48), 1.0 + 0.1 * torch.randn(48)
    agrees(lambda x, y, w: add_rms_norm(x, y, w, 1e-5), [x, y, weight], dtype)


@DTYPES
def test_a_norm_beside_its_input(dtype: torch.dtype) -> None:
    weight = 1.0 + 0.1 * torch.randn(48)
    agrees(lambda x, w: rms_norm_and_input(x, w, 1e-5), [torch.randn(4, 6, 48), weight], dtype)


@DTYPES
@pytest.mark.parametrize("batch_of_table", [1, 2])
def test_a_rotation_of_queries_and_keys_as_projections_leave_them(dtype: torch.dtype, batch_of_table: int) -> None:
    q, k = torch.randn(2, 5, 6, 16), torch.randn(2, 5, 2, 16)
    angles = torch.randn(batch_of_table, 5, 16)  # as `transformers` has it: both halves
    turn = lambda q, k, c, s: apply_rotary(q.transpose(1, 2), k.transpose(1, 2), c, s)  # noqa: E731
    agrees(turn, [q, k], dtype, [angles.cos(), angles.sin()])


@DTYPES
def test_a_gate(dtype: torch.dtype) -> None:
    agrees(swiglu, [3.0 * torch.randn(3, 700), torch.randn(3, 700)], dtype)


@DTYPES
def test_layers_of_one_input(dtype: torch.dtype) -> None:
    agrees(linears, [torch.randn(2, 7, 32), *(torch.randn(width, 32) / 6 for width in (48, 16, 16))], dtype)


@DTYPES
def test_a_gate_and_the_layer_behind_it(dtype: torch.dtype) -> None:
    agrees(gated_down, [torch.randn(3, 5, 300), torch.randn(3, 5, 300), torch.randn(32, 300) / 17], dtype)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
    ids=str,
)
def test_a_scaled_tensor_is_rounded_once(given: torch.dtype, wanted: torch.dtype) -> None:
    factor, near = torch.rand(()), 2**-7 if interprets() else 0.0  # which cuts off instead of rounding
    for x in (torch.randn(70, 130).to(given), torch.randn(13, 70).to(given).t()):
        torch.testing.assert_close(scaled(x, factor, wanted), (x.float() * factor).to(wanted), rtol=near, atol=0.0)
