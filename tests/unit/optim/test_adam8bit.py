"""AdamW with moments in 8 bits: as good as AdamW, a quarter of the memory, and no trace of it in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from plait.config import parse_sections
from plait.kernels import adam8bit
from plait.kernels.adam import AdamNumbers, adam_step_plain
from plait.kernels.adam8bit import (
    Levels,
    Packed,
    adam8bit_step,
    adam8bit_step_plain,
    make_levels,
    pack_into,
    unpack,
    zeros,
)
from plait.optim.adam8bit import AdamW8bit
from plait.plan.states import estimate_states

CPU = torch.device("cpu")
SHAPES = [(4, 256), (3, 700), (5, 64), (2, 3, 200), (0, 128)]


def packed(tensor: Tensor, levels: Levels) -> Packed:
    found = zeros(tensor, levels)
    pack_into(found, tensor)
    return found


def packed_bytes(optimizer: AdamW8bit) -> int:
    moments = [moment for state in optimizer.state.values() for moment in state.values()]
    return sum(moment.nbytes for moment in moments if isinstance(moment, Packed))


def wild(shape: tuple[int, ...], *, signed: bool) -> Tensor:
    """Numbers of very different sizes, with zeros among them."""
    found = torch.randn(shape) * 10 ** torch.empty(shape).uniform_(-6, 2)
    found[torch.rand(shape) < 0.1] = 0.0
    return found if signed else found.square()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_number_becomes_the_nearest_level_of_its_block(shape: tuple[int, ...], signed: bool) -> None:
    levels = make_levels(CPU, signed=signed)
    tensor = wild(shape, signed=signed)
    found = unpack(packed(tensor, levels))
    for row, other in zip(tensor.flatten(1), found.flatten(1), strict=True):
        for block, values in zip(row.split(adam8bit.BLOCK), other.split(adam8bit.BLOCK), strict=True):
            relative = block / block.abs().max()
            nearest = (levels.values[:-1] if signed else levels.values)[
                (relative[:, None] - levels.values[: 255 if signed else 256]).abs().argmin(1)
            ]
            off = (values / block.abs().max() - nearest).abs()
            kept = (block > 0) & (nearest == 0) & (not signed)  # a square never vanishes
            assert (off[~kept] < 1e-6).all()
            assert (values[kept] > 0).all()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_what_was_unpacked_changes_nothing(shape: tuple[int, ...], signed: bool) -> None:
    levels = make_levels(CPU, signed=signed)
    first = packed(wild(shape, signed=signed), levels)
    second = packed(unpack(first), levels)
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.scales, second.scales)


def test_codes_do_not_depend_on_how_rows_are_shared() -> None:
    levels = make_levels(CPU, signed=True)
    tensor = wild((7, 600), signed=True)
    whole = packed(tensor, levels)
    parts = [packed(part, levels) for part in tensor.split([2, 4, 1])]
    assert torch.equal(torch.cat([part.codes for part in parts]), whole.codes)
    assert torch.equal(torch.cat([part.scales for part in parts]), whole.scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_is_that_of_adamw_with_the_moments_as_they_were_unpacked(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.kernels.adam8bit._PIECE", 2048)
    numbers = AdamNumbers(4, lr=1e-2, weight_decay=0.1)
    weight, grad = torch.randn(20, 300).to(dtype), torch.randn(20, 300)
    mean = packed(0.1 * torch.randn(20, 300), make_levels(CPU, signed=True))
    square = packed(0.1 * torch.randn(20, 300).square(), make_levels(CPU, signed=False))
    expected, wide = weight.float(), (unpack(mean), unpack(square))
    adam_step_plain(numbers, [expected], [grad], [wide[0]], [wide[1]])
    adam8bit_step(numbers, weight, grad, mean, square)
    torch.testing.assert_close(weight, expected.to(dtype), rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
    torch.testing.assert_close(unpack(mean), unpack(packed(wide[0], mean.levels)), rtol=0.3, atol=1e-3)


def trained(make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[list[float], torch.optim.Optimizer]:
    """Losses of a small model that learns to add two digits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 64), nn.Flatten(), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 19))
    optimizer = make(model)
    losses = []
    for _ in range(300):
        digits = torch.randint(0, 10, (64, 2))
        loss = nn.functional.cross_entropy(model(digits), digits.sum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


def test_a_model_learns_as_it_does_with_adamw_in_a_quarter_of_the_memory() -> None:
    plain, reference = trained(lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3))
    small, optimizer = trained(lambda model: AdamW8bit(model.parameters(), lr=3e-3))
    assert isinstance(optimizer, AdamW8bit)
    assert small[0] == plain[0]
    for begin in (50, 100, 250):
        there, here = (sum(losses[begin : begin + 50]) / 50 for losses in (plain, small))
        assert here < 1.1 * there + 0.01
    matrices = [p for p in reference.param_groups[0]["params"] if p.ndim == 2]
    wide = sum(reference.state[p][key].nbytes for p in matrices for key in ("exp_avg", "exp_avg_sq"))
    assert packed_bytes(optimizer) < 0.26 * wide


def test_looking_at_the_state_finds_adamw_s_and_does_not_disturb_training() -> None:
    def once(look: bool) -> tuple[Tensor, AdamW8bit, nn.Parameter]:
        torch.manual_seed(1)
        weight = nn.Parameter(torch.randn(6, 300))
        optimizer = AdamW8bit([weight], lr=1e-2)
        for _ in range(5):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
            if look:
                optimizer.unpack()
        return weight.detach(), optimizer, weight

    undisturbed, _, _ = once(look=False)
    looked_at, optimizer, weight = once(look=True)
    assert torch.equal(undisturbed, looked_at)
    state = optimizer.state[weight]
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in state.items()} == {
        "step": (torch.float32, ()),
        "exp_avg": (torch.float32, (6, 300)),
        "exp_avg_sq": (torch.float32, (6, 300)),
    }


def test_biases_and_norms_keep_fp32_moments() -> None:
    bias = nn.Parameter(torch.randn(500))
    optimizer = AdamW8bit([bias], lr=1e-2, weight_decay=0.0)
    twin = nn.Parameter(bias.detach().clone())
    reference = torch.optim.AdamW([twin], lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        bias.grad = twin.grad = torch.randn(500)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(bias, twin, rtol=1e-6, atol=1e-7)
    assert packed_bytes(optimizer) == 0


def test_the_account_of_states_counts_codes_and_scales() -> None:
    account = estimate_states(parse_sections(optim={"type": "AdamW8bit"}, precision="bf16").config, 1_000_000)
    assert account.optimizer == pytest.approx(4 + 2 * (1 + 4 / 256))


def test_both_twins_take_the_same_arguments() -> None:
    weight, grad = torch.randn(3, 256), torch.randn(3, 256)
    moments = [zeros(weight, make_levels(CPU, signed=signed)) for signed in (True, False)]
    other = weight.clone(), [zeros(weight, moment.levels) for moment in moments]
    adam8bit_step(AdamNumbers(1, lr=0.1), weight, grad, *moments)
    adam8bit_step_plain(AdamNumbers(1, lr=0.1), other[0], grad, *other[1])
    assert torch.equal(weight, other[0])
