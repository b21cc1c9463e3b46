"""What spares device memory, on a real device: pinned rooms, 8-bit moments in one kernel, activations on the host."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from plait.kernels.adam import AdamNumbers
from plait.kernels.adam8bit import adam8bit_step, adam8bit_step_plain, make_levels, pack_into, unpack, zeros
from plait.kernels.pinned import host_empty

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODEL = {"type": "llama", "vocab_size": 512, "dim": 512, "layers": 6, "heads": 8, "kv_heads": 4, "seq_len": 512}


def test_a_pinned_room_is_pinned_exactly_and_copies_both_ways() -> None:
    room = host_empty(3, 1_000_003, pinned=True)
    assert room.is_pinned()
    values = torch.randn(3, 1_000_003, device="cuda")
    room.copy_(values, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(room, values.cpu())
    assert torch.equal(torch.empty_like(values).copy_(room, non_blocking=True), values)
    address = room.data_ptr()
    del room
    again = host_empty(3, 1_000_003, pinned=True)  # the memory was let go of, so it can be pinned again
    assert again.is_pinned()
    assert address


@pytest.mark.parametrize("shape", [(64, 1024), (33, 700), (5, 64), (4, 3, 200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decoupled", [True, False])
def test_the_kernel_of_8_bit_moments_is_its_plain_twin(shape: Any, dtype: torch.dtype, decoupled: bool) -> None:
    device = torch.device("cuda")
    weight, grad = torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device)
    moments = [zeros(weight, make_levels(device, signed=signed)) for signed in (True, False)]
    pack_into(moments[0], 0.1 * torch.randn(shape, device=device))
    pack_into(moments[1], 0.01 * torch.randn(shape, device=device).square())
    twins = [moment._replace(codes=moment.codes.clone(), scales=moment.scales.clone()) for moment in moments]
    twin = weight.clone()
    for step in range(1, 4):
        numbers = AdamNumbers(step, lr=1e-2, weight_decay=0.1, decoupled=decoupled, scale=0.5)
        adam8bit_step(numbers, weight, grad, *moments)
        adam8bit_step_plain(numbers, twin, grad, *twins)
    near = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(weight, twin, **near)
    for found, expected in zip(moments, twins, strict=True):
        # A number half-way between two levels may become the other one.
        assert (found.codes != expected.codes).float().mean() < 0.01
        torch.testing.assert_close(found.scales, expected.scales, rtol=1e-5, atol=0)
        assert torch.dist(unpack(found), unpack(expected)) < 0.01 * unpack(expected).norm()


def run(strategy: dict[str, Any], optim: dict[str, Any], *, steps: int = 4) -> tuple[list[float], float]:
    """Losses of a few steps, and the most memory that one took beyond what was in use before, in MiB."""
    gc.collect()  # an engine is a circle of objects, and frees its memory when those are collected
    before = torch.cuda.memory_allocated()
    config = parse_sections(model=MODEL, strategy=strategy, optim=optim, precision="bf16", device="cuda", seed=3).config
    engine = prepare_native(Preparation(config, open_world(config)))
    generator = torch.Generator().manual_seed(5)
    losses = []
    for step in range(steps):
        ids = torch.randint(0, 512, (8, 513), generator=generator)
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        losses.append(engine.train_step([{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}] * 2).loss)
    return losses, (torch.cuda.max_memory_allocated() - before) / 2**20


def test_an_engine_that_nobody_holds_gives_its_memory_back() -> None:
    run({}, {"type": "AdamW"}, steps=1)  # what libraries keep for good, they have taken after this
    gc.collect()
    before = torch.cuda.memory_allocated()
    run({}, {"type": "AdamW"}, steps=1)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_on_the_host_change_no_number_and_free_the_device(recompute: str) -> None:
    optim = {"type": "AdamW", "lr": 1e-3}
    with sdpa_kernel(SDPBackend.MATH):  # the backward pass of the fast kernels adds up in any order
        plain, before = run({"recompute": recompute}, optim)
        offloaded, after = run({"recompute": recompute, "offload": {"activations": "all"}}, optim)
    assert offloaded == plain
    assert after < before


def test_8_bit_moments_train_as_32_bit_ones_do_in_less_memory() -> None:
    plain, before = run({}, {"type": "AdamW", "lr": 1e-3})
    small, after = run({}, {"type": "AdamW8bit", "lr": 1e-3})
    assert small == pytest.approx(plain, rel=0.01)
    assert after < before


def test_the_state_of_8_bit_moments_is_loaded_again() -> None:
    config = parse_sections(model=MODEL, optim={"type": "AdamW8bit"}, device="cuda", seed=3).config
    engine, again = (prepare_native(Preparation(config, open_world(config))) for _ in range(2))
    ids = torch.randint(0, 512, (4, 129))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    engine.train_step([batch])
    tensors = {name: tensor.detach().clone() for name, tensor in engine.state_tensors().items()}
    again.allocate_optimizer_state(
        {
            name.removeprefix("optim."): (tensor.shape, tensor.dtype)
            for name, tensor in tensors.items()
            if name.startswith("optim.")
        }
    )
    with torch.no_grad():
        for name, tensor in again.state_tensors().items():
            tensor.copy_(tensors[name])
    again.state_loaded()
    again.steps = engine.steps
    with sdpa_kernel(SDPBackend.MATH):
        assert again.train_step([batch]).loss == engine.train_step([batch]).loss
        assert again.train_step([batch]).loss == engine.train_step([batch]).loss
