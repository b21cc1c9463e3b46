"""Every kernel gives a block's output, log-sum-exp and gradients as the plain twin does, and blocks can be merged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from plait.distributed.context_parallel_attention import (
    AttentionBlock,
    Kernel,
    _merge,
    bias_of,
    choose_kernel,
    cpu,
    efficient,
    flash,
    reference,
)

SHAPES = [(12, 12), (12, 7), (5, 33), (1, 1)]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
KERNELS = [
    *(pytest.param(cpu, "cpu", dtype, id=f"cpu-{dtype}") for dtype in TOLERANCES),
    *(pytest.param(reference, "cpu", dtype, id=f"reference-{dtype}") for dtype in (torch.float64, torch.bfloat16)),
    *(
        pytest.param(kernel, "cuda", dtype, id=f"{kernel.name}-{dtype}", marks=[pytest.mark.gpu, gpu])
        for kernel, dtypes in (
            (flash, (torch.bfloat16, torch.float16)),
            (efficient, (torch.float32, torch.bfloat16, torch.float16)),
            (reference, (torch.float64,)),
        )
        for dtype in dtypes
    ),
]


def draw(queries: int, keys: int, kv_heads: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Queries, keys, values and a gradient of the output."""
    shapes = [(4, queries), (kv_heads, keys), (kv_heads, keys), (4, queries)]
    return tuple(torch.randn(2, *shape, 16, dtype=dtype, device=device) for shape in shapes)


def documents_bias(queries: int, keys: int, dtype: torch.dtype, device: str) -> Tensor:
    ids = torch.randint(0, 3, (2, queries), device=device), torch.randint(0, 3, (2, keys), device=device)
    allowed = ids[0][:, :, None] == ids[1][:, None, :]
    allowed[0, 0] = False  # a query that finds nothing here
    return bias_of(allowed[:, None], dtype)


def blocks(kernel: Kernel, dtype: torch.dtype, device: str) -> Iterator[tuple[AttentionBlock, Tensor]]:
    """Every shape with every number of key heads: causal, whole and masked; and a gradient of the output."""
    for queries, keys in SHAPES:
        for kv_heads in (4, 2, 1):
            *tensors, gradient = draw(queries, keys, kv_heads, dtype, device)
            yield AttentionBlock(*tensors, None, False, 0.3), gradient
            if queries == keys:
                yield AttentionBlock(*tensors, None, True, 0.3), gradient
            if kernel is not flash:
                yield AttentionBlock(*tensors, documents_bias(queries, keys, dtype, device), False, 0.3), gradient


def widened(block: AttentionBlock) -> AttentionBlock:
    return AttentionBlock(*(x.double() if isinstance(x, Tensor) else x for x in block))


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    assert found.shape == expected.shape, what
    if expected.numel():
        scale = max(float(expected.abs().max()), 1e-2)
        error = float((found.double() - expected).abs().max()) / scale
        assert error <= TOLERANCES[dtype], f"{what} differs by {error:.1e}"


@pytest.mark.parametrize(("kernel", "device", "dtype"), KERNELS)
def test_a_kernel_agrees_with_the_plain_twin_in_fp64(kernel: Kernel, device: str, dtype: torch.dtype) -> None:
    for block, gradient in blocks(kernel, dtype, device):
        wide = widened(block)
        output, lse = reference.forward(wide)
        found, found_lse = kernel.forward(block)
        seen = lse > -1e3  # of a query without keys only the low log-sum-exp counts
        assert bool((found_lse[~seen] < -1e3).all())
        assert_close(found[seen], output[seen], dtype, "output")
        assert_close(found_lse[seen], lse[seen], dtype, "log-sum-exp")
        # As in a ring: the backward pass gets output and log-sum-exp over more keys than these.
        results = (output.masked_fill(~seen[..., None], 0.5) * 0.9).to(dtype), lse.masked_fill(~seen, 2.0) + 0.4
        wide_results = (x.double() for x in results)
        expected = reference.backward(gradient.double(), wide, *wide_results)
        output, lse = results[0], results[1].to(found_lse.dtype)
        parts = kernel.backward(gradient, block, output, lse)
        for name, part, whole in zip("qkv", parts, expected, strict=True):
            assert_close(part, whole, dtype, f"gradient of {name}")


def test_the_plain_twin_has_the_gradients_of_autograd() -> None:
    for block, gradient in blocks(reference, torch.float64, "cpu"):
        leaves = [x.detach().requires_grad_() for x in block[:3]]
        output, lse = reference.forward(block._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
        expected = torch.autograd.grad(output, leaves, gradient)
        found = reference.backward(gradient, block, output.detach(), lse.detach())
        for name, part, whole in zip("qkv", found, expected, strict=True):
            assert_close(part, whole, torch.float64, f"gradient of {name}")


def test_results_over_some_keys_merge_into_that_over_all() -> None:
    q, k, v, _ = draw(9, 20, 2, torch.float64, "cpu")
    bias = documents_bias(9, 20, torch.float64, "cpu")
    bias[..., 0] = 0.0  # so that each query finds something, if only in the first part

    def over(keys: slice) -> tuple[Tensor, Tensor]:
        return reference.forward(AttentionBlock(q, k[:, :, keys], v[:, :, keys], bias[..., keys], False, 0.3))

    expected, expected_lse = over(slice(None))
    output, lse = over(slice(0, 6))
    for keys in (slice(6, 7), slice(7, 20)):
        _merge(output, lse, *over(keys))
    assert_close(output, expected, torch.float64, "output")
    assert_close(lse, expected_lse, torch.float64, "log-sum-exp")


def test_the_kernel_is_the_fastest_that_takes_the_tensors() -> None:
    def chosen(device: str, dtype: torch.dtype, dim: int, value_dim: int, *, biased: bool) -> str:
        q, k, v = (
            torch.empty(2, heads, 8, d, dtype=dtype, device=device) for heads, d in ((4, dim), (2, dim), (2, value_dim))
        )
        return choose_kernel(q, k, v, biased=biased).name

    assert chosen("cpu", torch.bfloat16, 64, 64, biased=True) == "cpu"
    assert chosen("cpu", torch.float32, 64, 32, biased=False) == "reference"
    assert chosen("meta", torch.float32, 64, 64, biased=False) == "reference"
    if torch.cuda.is_available():
        assert chosen("cuda", torch.bfloat16, 64, 64, biased=False) == "flash"
        assert chosen("cuda", torch.bfloat16, 64, 64, biased=True) == "efficient"
        assert chosen("cuda", torch.float32, 64, 64, biased=False) == "efficient"
        assert chosen("cuda", torch.float32, 12, 12, biased=False) == "reference"
        assert chosen("cuda", torch.float64, 64, 64, biased=False) == "reference"
