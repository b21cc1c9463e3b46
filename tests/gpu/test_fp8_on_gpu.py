"""Rounding to 8 bits on a real device: the kernels against their plain twins, and whole runs against bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from plait.kernels.cross_entropy import write_fp8_probs, write_fp8_probs_plain
from plait.kernels.fp8 import E4M3, E5M2, Fp8Matrix, amax_of, amax_plain, fp8_cast, fp8_cast_plain, fp8_linears
from plait.kernels.fp8_gated import (
    cast_product,
    cast_product_plain,
    cast_slopes,
    cast_slopes_plain,
    fp8_feed_forward,
    gate_amax,
    gate_amax_plain,
)
from plait.models.common.losses import WAITING, Fp8Head, linear_cross_entropy
from plait.precision.fp8 import Fp8Linear

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_FP8, reason="needs a CUDA device with 8-bit products")]

CUDA = torch.device("cuda")
MODEL = {"type": "llama", "vocab_size": 512, "dim": 256, "layers": 4, "heads": 4, "kv_heads": 2, "seq_len": 256}


def random(*shape: int) -> Tensor:
    return (torch.randn(shape, device=CUDA) * 10.0 ** torch.randint(-3, 3, shape, device=CUDA)).bfloat16()


def bits(small: Fp8Matrix) -> list[Tensor]:
    return [small.rows.view(torch.uint8), small.columns.view(torch.uint8), small.inverse]


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    ("shapes", "dim"),
    [
        ([(1000, 2048)], 0),
        ([(37, 48)], 0),
        ([(1, 16)], 0),
        ([(2048, 512), (512, 512), (528, 512)], 0),
        ([(777, 512), (777, 16), (777, 144)], 1),
    ],
    ids=str,
)
def test_casts_are_those_of_the_twin_bit_for_bit(dtype: torch.dtype, shapes: list[tuple[int, int]], dim: int) -> None:
    tensors = [random(*shape) for shape in shapes]
    peaks, plain = amax_of(tensors), amax_plain(tensors)
    assert torch.equal(peaks.max(), plain.max())
    for rows, columns in ((True, True), (True, False), (False, True)):
        found = fp8_cast(tensors, peaks, dtype, dim=dim, rows=rows, columns=columns)
        wanted = fp8_cast_plain(tensors, plain, dtype, dim=dim, rows=rows, columns=columns)
        assert all(torch.equal(a, b) for a, b in zip(bits(found), bits(wanted), strict=True))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_casts_with_peaks_of_others_cut_and_note_as_the_twin_does(dtype: torch.dtype) -> None:
    tensors = [random(1000, width) for width in (512, 16, 144)]
    tensors[0][7, 5], tensors[2][0, 0] = torch.inf, torch.nan
    peaks = torch.rand(3, device=CUDA) * 100
    notes, plain = (torch.zeros(3, dtype=torch.int32, device=CUDA) for _ in range(2))
    given: dict[str, Any] = {"dim": 1, "rows": True, "columns": True, "saturates": True}
    found = fp8_cast(tensors, peaks, dtype, **given, amax_bits=notes)
    wanted = fp8_cast_plain(tensors, peaks, dtype, **given, amax_bits=plain)
    assert torch.equal(notes[1], plain[1])
    assert not notes.view(torch.float32)[[0, 2]].isfinite().any()
    for ours, twins in ((found.rows, wanted.rows), (found.columns, wanted.columns)):
        bad = ours.float().isnan()
        assert torch.equal(bad, twins.float().isnan())
        assert bad.sum() == 2
        assert torch.equal(ours.float()[~bad], twins.float()[~bad])
    assert torch.equal(found.inverse, wanted.inverse)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    x, weights = random(64, 32), [random(16, 32).requires_grad_(), random(48, 32).requires_grad_()]
    x[5, 7] = bad
    outputs = fp8_linears(x, weights, [None, None], rowwise=False, emulated=False)
    assert not any(torch.isfinite(y).any() for y in outputs)
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    assert not any(torch.isfinite(weight.grad).any() for weight in weights)


@pytest.mark.parametrize("tokens", [1024, 37])
def test_the_middle_of_a_feed_forward_is_that_of_the_twin(tokens: int) -> None:
    gate, up, grad = (torch.randn(tokens, 272, device=CUDA).bfloat16() for _ in range(3))
    peaks = gate_amax(gate, up), gate_amax(gate, up, grad)
    for found, wanted in zip(peaks, (gate_amax_plain(gate, up), gate_amax_plain(gate, up, grad)), strict=True):
        torch.testing.assert_close(found.max(), wanted.max(), rtol=2**-7, atol=0.0)
    ours = [cast_product(gate, up, peaks[0]), *cast_slopes(gate, up, grad, peaks, rows=True)]
    plain = [cast_product_plain(gate, up, peaks[0]), *cast_slopes_plain(gate, up, grad, peaks, rows=True)]
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one.inverse, other.inverse)
        for found, wanted in ((one.rows, other.rows), (one.columns, other.columns)):
            assert found.shape == wanted.shape
            # The last bit of a sigmoid moves a number to its neighbour now and then.
            assert (found.float() != wanted.float()).sum() <= 0.01 * wanted.numel()
            assert (found.float() - wanted.float()).norm() <= 0.02 * wanted.float().norm()


def test_the_middle_of_a_feed_forward_notes_what_its_peaks_would_be() -> None:
    gate, up, grad = (torch.randn(1000, 272, device=CUDA).bfloat16() for _ in range(3))
    peaks = gate_amax(gate, up), gate_amax(gate, up, grad)
    notes = torch.zeros(3, dtype=torch.int32, device=CUDA)
    low = peaks[0].max()[None] / 4, peaks[1].max().repeat(2) / 4
    product = cast_product(gate, up, low[0], amax_bits=notes[:1], saturates=True)
    turned, slopes = cast_slopes(gate, up, grad, low, rows=True, amax_bits=notes[1:], saturates=True)
    found = notes.view(torch.float32)
    for ours, largest in ((found[0], peaks[0].max()), (found[1:].max(), peaks[1].max())):
        torch.testing.assert_close(ours, largest, rtol=2**-7, atol=0.0)
    for small, limit in ((product.rows, 448), (turned.columns, 448), (slopes.rows, 57344), (slopes.columns, 57344)):
        assert small.float().abs().max() == limit
        assert (small.float().abs() == limit).sum() > 1


@pytest.mark.parametrize("tokens", [512, 37])
def test_layers_together_are_those_of_the_twin(tokens: int) -> None:
    x, weights = torch.randn(tokens, 256, device=CUDA), [0.05 * torch.randn(n, 256, device=CUDA) for n in (256, 64, 64)]
    ups = [torch.randn(tokens, len(weight), device=CUDA).bfloat16() for weight in weights]
    results = []
    for emulated in (False, True):
        given = [t.bfloat16().requires_grad_() for t in (x, *weights)]
        outputs = fp8_linears(given[0], given[1:], [None] * 3, rowwise=False, emulated=emulated)
        torch.autograd.backward(outputs, ups)
        results.append([*outputs, *(t.grad for t in given)])
    for found, wanted in zip(*results, strict=True):
        # Sums are rounded to bf16, and a fast one keeps fewer bits on the way.
        assert (found - wanted).float().norm() < 0.01 * wanted.float().norm()


@pytest.mark.parametrize("tokens", [512, 37])
def test_a_feed_forward_is_that_of_the_twin(tokens: int) -> None:
    shapes = (tokens, 256), (512, 256), (512, 256), (256, 512)
    inputs = [torch.randn(shape, device=CUDA) * (1.0 if at == 0 else 0.05) for at, shape in enumerate(shapes)]
    up = torch.randn(tokens, 256, device=CUDA).bfloat16()
    results = []
    for emulated in (False, True):
        given = [t.bfloat16().requires_grad_() for t in inputs]
        y = fp8_feed_forward(*given, emulated=emulated)
        y.backward(up)
        results.append([y, *(t.grad for t in given)])
    for found, wanted in zip(*results, strict=True):
        # What a fast sum loses is rounded to 8 bits again.
        assert (found - wanted).float().norm() < 0.05 * wanted.float().norm()


@pytest.mark.parametrize(("tokens", "words"), [(300, 1003), (128, 512), (5, 17)])
def test_probabilities_in_8_bits_are_those_of_the_twin(tokens: int, words: int) -> None:
    logits = 5 * torch.randn(tokens, words, device=CUDA).bfloat16()
    labels = torch.randint(-1, words, (tokens,), device=CUDA)
    high, wide = tokens + -tokens % 16, words + -words % 16
    results = []
    for write in (write_fp8_probs, write_fp8_probs_plain):
        rows, columns = (torch.empty(shape, dtype=E5M2, device=CUDA) for shape in ((tokens, wide), (words, high)))
        write(logits, labels, logits.float().logsumexp(1), rows, columns)
        results.append((rows.float(), columns.float()))
    for found, wanted in zip(*results, strict=True):
        # The last bit of an exponential moves a number to its neighbour now and then.
        assert (found != wanted).sum() <= 0.01 * wanted.numel()
        torch.testing.assert_close(found, wanted, rtol=0.26, atol=2.0**-16)
    rows, columns = results[0]
    assert torch.equal(columns[:, :tokens], rows[:, :words].t())
    assert not rows[:, words:].any()
    assert not columns[:, tokens:].any()


@pytest.mark.parametrize("tokens", [128 * WAITING, 128 * WAITING + 77])
def test_a_head_in_8_bits_is_that_of_the_twin_and_near_16_bits(tokens: int) -> None:
    weight = torch.randn(1003, 256, device=CUDA).bfloat16().requires_grad_()
    labels = torch.randint(-1, 1003, (tokens,), device=CUDA)
    hidden = (torch.randn(tokens, 256, device=CUDA) * 0.1 + 0.03 * weight.detach()[labels.clamp(min=0)]).bfloat16()
    hidden, labels = hidden.requires_grad_(), labels.where(labels >= 0, -100)
    results = []
    for how in (Fp8Head(emulated=False), Fp8Head(emulated=True), None):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_bytes=128 * 1003 * 2, fp8=how).sum
        results.append([loss, *torch.autograd.grad(loss, (hidden, weight))])
    for found, twin, wide in zip(*results, strict=True):
        assert (found - twin).float().norm() < 0.01 * twin.float().norm()
        assert (found - wide).float().norm() < 0.03 * wide.float().norm()


def engine_of(precision: Any, **strategy: Any) -> Any:
    config = parse_sections(
        model=MODEL,
        strategy=strategy,
        precision=precision,
        optim={"type": "AdamW", "lr": 1e-3},
        train={"clip_norm": 1.0},
        device="cuda",
        seed=3,
    ).config
    return prepare_native(Preparation(config, open_world(config), log=lambda _text: None))


def losses_of(precision: Any, **strategy: Any) -> tuple[list[float], Any]:
    engine = engine_of(precision, **strategy)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(12):
        ids = torch.randint(0, 64, (8, 257), generator=generator) ** 2 % 512
        losses.append(float(engine.train_step([{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}]).loss))
    return losses, engine.model


def test_training_stays_near_bf16_with_and_without_the_fused_forms() -> None:
    wide, _ = losses_of("bf16")
    small, model = losses_of("fp8")
    assert sum(isinstance(module, Fp8Linear) for module in model.modules()) == 4 * 7
    assert wide[-1] < wide[0]
    assert small != wide
    assert small == pytest.approx(wide, rel=0.03)
    assert losses_of("fp8", kernels="plain")[0] == pytest.approx(wide, rel=0.03)
    assert losses_of("fp8", recompute="full")[0] == pytest.approx(small, rel=0.01)


EARLIER: dict[str, Any] = {"fp8": {"scales": "earlier", "history": 3}}


def test_with_scales_of_earlier_steps_it_stays_as_near() -> None:
    wide, _ = losses_of("bf16")
    now, _ = losses_of("fp8")
    earlier, _ = losses_of(EARLIER)
    assert earlier != now
    assert earlier == pytest.approx(wide, rel=0.03)
    assert losses_of(EARLIER, kernels="plain")[0] == pytest.approx(wide, rel=0.03)
    assert losses_of(EARLIER, recompute="full")[0] == pytest.approx(earlier, rel=0.01)


def test_with_a_head_in_8_bits_it_stays_as_near() -> None:
    small, _ = losses_of("fp8")
    head, _ = losses_of({"fp8": {"head": True}})
    assert head != small
    assert head == pytest.approx(small, rel=0.02)


@pytest.mark.parametrize("fp8", [EARLIER["fp8"], {**EARLIER["fp8"], "head": True}], ids=str)
def test_scales_and_head_are_not_waited_for(fp8: dict[str, Any]) -> None:
    engine = engine_of({"fp8": fp8})
    ids = torch.randint(0, 512, (4, 257))
    batch = {"input_ids": ids[:, :-1].contiguous().pin_memory(), "labels": ids[:, 1:].contiguous().pin_memory()}
    for _ in range(5):  # kernels of both kinds are loaded
        engine.train_step([batch])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [engine.train_step([batch]) for _ in range(4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert results[-1].loss < results[0].loss
