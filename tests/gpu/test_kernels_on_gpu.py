"""Kernels on a real device: each against its plain twin in float64, and whole runs with and without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from plait.engine.master_weights import RoundedParams
from plait.kernels.adam import AdamNumbers
from plait.kernels.cross_entropy import scaled
from plait.kernels.fp8 import fp8_linear
from plait.kernels.fused_adam import Tables, WeightPointers, adam_many, adam_many_plain
from plait.kernels.linears import feed_forward, gated_down, linears
from plait.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_and_input
from plait.kernels.rotary import apply_rotary
from plait.kernels.swiglu import swiglu
from plait.optim.fused_adam import OnePassAdam

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs 8-bit products"
)

CUDA = torch.device("cuda")
MODEL = {"type": "llama", "vocab_size": 512, "dim": 256, "layers": 4, "heads": 4, "kv_heads": 2, "seq_len": 256}


# ---- AdamW


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decoupled", [True, False])
def test_adamw_over_many_tensors_is_its_plain_twin(grad_dtype: torch.dtype, decoupled: bool) -> None:
    room = torch.randn(100_000, device=CUDA)
    shapes = ((7,), (1000, 333), (4096, 1024), (0,), (129,))

    def entry(shape: tuple[int, ...], kind: torch.dtype) -> WeightPointers:
        torch.manual_seed(len(shape) + shape[0])
        weight = room[1 : 1 + shape[0]].clone() if len(shape) == 1 else torch.randn(shape, device=CUDA)
        grad = torch.randn(shape, device=CUDA).to(grad_dtype)
        moments = 0.1 * torch.randn(shape, device=CUDA), 0.01 * torch.rand(shape, device=CUDA)
        return WeightPointers(weight.to(kind), grad, moments[0].to(kind), moments[1].to(kind), weight.bfloat16())

    ours, exact = ([entry(shape, kind) for shape in shapes] for kind in (torch.float32, torch.float64))
    # One that begins in the middle of a tensor, where no wide access may begin.
    shifted = room[1:131].view(130)
    ours.append(
        WeightPointers(shifted, torch.ones_like(shifted), torch.zeros_like(shifted), torch.zeros_like(shifted), None)
    )
    exact.append(WeightPointers(*(None if t is None else t.double() for t in ours[-1])))  # type: ignore[arg-type]
    numbers = AdamNumbers(1, 1e-2, (0.9, 0.95), 1e-8, 0.1, decoupled)
    scale, fine = torch.tensor(3.0, device=CUDA), torch.zeros((), device=CUDA)
    counts = [[torch.zeros((), device=CUDA) for _ in ours] for _ in range(2)]
    tables = Tables()
    for _ in range(3):
        adam_many(numbers, ours, counts[0], scale=scale, found_inf=fine, tables=tables)
        adam_many_plain(numbers, exact, counts[1], scale=scale, found_inf=fine)
    for found, wanted in zip(ours, exact, strict=True):
        for a, b in zip(found[:1] + found[2:4], wanted[:1] + wanted[2:4], strict=True):
            torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=1e-6)
        assert found.rounded is None or torch.equal(found.rounded, found.weight.bfloat16())
    before = ours[1].weight.clone()
    adam_many(numbers, ours, counts[0], scale=scale, found_inf=torch.ones((), device=CUDA), tables=tables)
    assert torch.equal(ours[1].weight, before)
    assert [float(count) for count in counts[0]] == [3.0] * len(ours)


# ---- layers


def agrees(function: Callable[..., Any], inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
    results = []
    for kind in (dtype, torch.float64):
        given = [t.to(dtype).to(kind, copy=True).requires_grad_() for t in inputs]
        outputs = function(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        ups = [torch.linspace(-1, 1, y.numel(), device=CUDA).view(y.shape).to(kind) for y in outputs]
        torch.autograd.backward(outputs, ups)
        results.append([*outputs, *(t.grad for t in given)])
    for found, wanted in zip(*results, strict=True):
        limit = (2e-2 if dtype == torch.bfloat16 else 1e-4) * wanted.abs().max().clamp(min=1.0)
        assert (found.double() - wanted).abs().max() <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 1000, 4096, 14336])
def test_norms(dtype: torch.dtype, width: int) -> None:
    x, y = (torch.randn(3, 211, width, device=CUDA) for _ in range(2))
    weight = 1 + 0.1 * torch.randn(width, device=CUDA)
    agrees(lambda x, w: rms_norm(x, w, 1e-5), [x, weight], dtype)
    agrees(lambda x, y, w: add_rms_norm(x, y, w, 1e-5), [x, y, weight], dtype)
    agrees(lambda x, w: rms_norm_and_input(x, w, 1e-5), [x, weight], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 64), (12, 12, 128), (3, 1, 80)])
def test_rotations(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    angles = torch.rand(1, 77, dim // 2, device=CUDA) * 50
    q, k = torch.randn(2, 77, heads, dim, device=CUDA), torch.randn(2, 77, kv_heads, dim, device=CUDA)
    agrees(lambda q, k: apply_rotary(q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin()), [q, k], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates(dtype: torch.dtype) -> None:
    agrees(swiglu, [torch.randn(5, 3001, device=CUDA) for _ in range(2)], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [512, 77])
def test_layers_that_share_an_input_and_a_gate_with_the_layer_behind_it(dtype: torch.dtype, tokens: int) -> None:
    torch.set_float32_matmul_precision("highest")
    x, gate, up = (torch.randn(2, tokens, width, device=CUDA) for width in (256, 640, 640))
    weights = [torch.randn(width, 256, device=CUDA) / 16 for width in (256, 64, 64)]
    agrees(linears, [x, *weights], dtype)
    agrees(gated_down, [gate, up, torch.randn(256, 640, device=CUDA) / 25], dtype)


def test_a_feed_forward_keeps_two_inner_tensors() -> None:
    gate, up = (torch.nn.Linear(256, 4096, bias=False, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    down = torch.nn.Linear(4096, 256, bias=False, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(2048, 256, device=CUDA).bfloat16().requires_grad_()
    feed_forward(x, gate, up, down).sum().backward()  # what is allocated once, is
    before = torch.cuda.memory_allocated()
    y = feed_forward(x, gate, up, down)
    assert 2.0 <= (torch.cuda.memory_allocated() - before) / (2048 * 4096 * 2) < 2.5
    y.sum().backward()


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_a_scaled_tensor_is_rounded_once(given: torch.dtype) -> None:
    x, factor = torch.randn(1001, 333, device=CUDA).to(given), torch.rand((), device=CUDA)
    for wanted in (torch.float32, torch.bfloat16):
        assert torch.equal(scaled(x, factor, wanted), (x.float() * factor).to(wanted))


@needs_fp8
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("tokens", [512, 37])
def test_products_in_8_bits_are_those_of_the_twin(rowwise: bool, tokens: int) -> None:
    x, weight = torch.randn(tokens, 256, device=CUDA), 0.05 * torch.randn(512, 256, device=CUDA)
    up = torch.randn(tokens, 512, device=CUDA).bfloat16()
    results = []
    for emulated in (False, True):
        given = [t.bfloat16().requires_grad_() for t in (x, weight)]
        y = fp8_linear(given[0], given[1], None, rowwise=rowwise, emulated=emulated)
        y.backward(up)
        results.append([y, *(t.grad for t in given)])
    for found, wanted in zip(*results, strict=True):
        # Sums are rounded to bf16, and a fast one keeps fewer bits on the way.
        assert (found - wanted).float().norm() < 0.01 * wanted.float().norm()


# ---- whole runs


def losses_of(precision: Any, strategy: Any, *, implementation: str = "auto", model: Any = MODEL) -> Any:
    config = parse_sections(
        model=model,
        strategy=strategy,
        precision=precision,
        optim={"type": "AdamW", "lr": 1e-3, "implementation": implementation},
        train={"clip_norm": 1.0},
        device="cuda",
        seed=3,
    ).config
    engine: Any = prepare_native(Preparation(config, open_world(config)))
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(12):
        ids = torch.randint(0, 64, (8, 257), generator=generator) ** 2 % 512
        losses.append(float(engine.train_step([{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}]).loss))
    return losses, engine


def test_kernels_are_the_default_and_train_as_plain_operations_do() -> None:
    plain, _ = losses_of("bf16", {"kernels": "plain"}, implementation="fused")
    fused, engine = losses_of("bf16", {})
    assert isinstance(engine.updater.optimizer, OnePassAdam)
    assert isinstance(engine.master_weights, RoundedParams)
    assert type(engine.model.norm).__name__ == "FusedRMSNorm"
    assert fused == pytest.approx(plain, rel=0.01)
    recomputed, _ = losses_of("bf16", {"recompute": "full"})
    assert recomputed == pytest.approx(fused, rel=0.01)
    for param, weight in zip(engine.model.parameters(), engine.master_weights.tensors, strict=True):
        assert torch.equal(param, weight.to(param.dtype))


def test_a_model_of_transformers_trains_as_plain_operations_do() -> None:
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 512, "hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = {"type": "hf", "config": {"model_type": "qwen3", **sizes, **heads}}
    plain, _ = losses_of("bf16", {"kernels": "plain"}, model=model)
    fused, _ = losses_of("bf16", {}, model=model)
    assert fused == pytest.approx(plain, rel=0.01)


@needs_fp8
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_in_8_bits_follows_bf16(recipe: str, compiled: bool) -> None:
    plain, _ = losses_of("bf16", {"compile": compiled})
    small, _ = losses_of({"fp8": recipe}, {"compile": compiled})
    assert small == pytest.approx(plain, rel=0.03)
    assert small[-1] < small[0]
