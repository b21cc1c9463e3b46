"""Recomputing activations changes memory, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config.strategy import RecomputeConfig, WrapConfig
from plait.distributed.activation_checkpointing import apply_recompute
from plait.distributed.wrap import WrapUnit, find_wrap_units
from plait.errors import ConfigError

BLOCKS = 4


class Block(nn.Module):
    """Attention with dropout and a feed-forward, counting its calls."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.drop = nn.Dropout(0.2)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + scale * self.drop(F.gelu(self.out(mixed)))


class Model(nn.Module):
    block_classes = (Block,)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.square().sum()


def run(mode: str, **options: Any) -> dict[str, Any]:
    """One forward and backward; also which tensors were kept between them."""
    torch.manual_seed(0)
    model = Model()
    section = RecomputeConfig(mode=mode, **{k: v for k, v in options.items() if k != "levels"})  # type: ignore[arg-type]
    names = apply_recompute(find_wrap_units(model, WrapConfig()), section, levels=options.get("levels", ()))
    inputs = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(1))
    kept: dict[int, Tensor] = {}
    weights = {p.untyped_storage()._cdata for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    torch.manual_seed(2)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(inputs)
    forward_calls = [block.calls for block in model.blocks]  # type: ignore[union-attr]
    loss.backward()
    return {
        "names": names,
        "loss": loss.detach(),
        "grads": {name: p.grad for name, p in model.named_parameters()},
        "state": list(model.state_dict()),
        "bytes": sum(t.untyped_storage().nbytes() for t in kept.values()),
        "again": [block.calls - calls for block, calls in zip(model.blocks, forward_calls, strict=True)],  # type: ignore[union-attr]
        "next": torch.rand(1),
    }


MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "every": {"every": 2},
    "selective": {},
    "auto": {"levels": ["full", "attention", "cheap", "none"]},
}


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradients_are_bitwise_those_without_recomputing(mode: str) -> None:
    plain, found = run("none"), run(mode, **MODES[mode])
    assert torch.equal(found["loss"], plain["loss"])
    for name, grad in plain["grads"].items():
        assert torch.equal(found["grads"][name], grad), name
    assert torch.equal(found["next"], plain["next"])  # dropout drew the same numbers, once


@pytest.mark.parametrize("mode", MODES)
def test_no_name_changes(mode: str) -> None:
    assert run(mode, **MODES[mode])["state"] == run("none")["state"]


@pytest.mark.parametrize(
    ("mode", "options", "again"),
    [
        ("none", {}, [0, 0, 0, 0]),
        ("full", {}, [1, 1, 1, 1]),
        ("selective", {}, [1, 1, 1, 1]),
        ("every", {"every": 1}, [1, 1, 1, 1]),
        ("every", {"every": 2}, [0, 1, 0, 1]),
        ("every", {"every": 3}, [0, 0, 1, 0]),
        ("every", {"every": 9}, [0, 0, 0, 0]),
        ("auto", {"levels": []}, [0, 0, 0, 0]),
        ("auto", {"levels": ["full", "attention", "cheap", "none"]}, [1, 1, 1, 0]),
        ("auto", {"levels": ["full", "none"]}, [1, 0, 0, 0]),
    ],
)
def test_the_chosen_blocks_run_a_second_time_in_the_backward_pass(
    mode: str, options: dict[str, Any], again: list[int]
) -> None:
    found = run(mode, **options)
    assert found["again"] == again
    assert found["names"] == [f"blocks.{i}" for i, count in enumerate(again) if count]


def test_the_more_is_recomputed_the_less_is_kept() -> None:
    levels = [["full"] * n + ["none"] * (BLOCKS - n) for n in range(BLOCKS + 1)]
    kept = [run("auto", levels=each)["bytes"] for each in levels]
    assert sorted(kept, reverse=True) == kept
    assert len(set(kept)) == len(kept)
    assert kept[-1] < kept[0] / 4


@pytest.mark.parametrize("mode", MODES)
def test_units_may_be_gone_through_backwards_twice(mode: str) -> None:
    def penalized(mode: str, **options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model()
        levels = options.pop("levels", ())
        apply_recompute(find_wrap_units(model, WrapConfig()), RecomputeConfig(mode=mode, **options), levels=levels)  # type: ignore[arg-type]
        inputs = torch.randn(3, 8, 16, requires_grad=True)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # others have no second derivative
            loss = model(inputs)
            (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
            (loss + slope.square().sum()).backward()
        return [param.grad for param in model.parameters() if param.grad is not None]

    for found, plain in zip(penalized(mode, **MODES[mode]), penalized("none"), strict=True):
        torch.testing.assert_close(found, plain)


def test_selective_keeps_the_results_of_its_operations_in_its_own_store() -> None:
    # Every block runs again, but its matrix products and attention do not.
    counts = {}
    for mode, options in (("none", {}), ("full", {}), ("selective", {}), ("selective", {"save_ops": ["gelu"]})):
        with _Counting() as counter:
            run(mode, **options)
        counts[mode, *options] = counter.products
    assert counts["none",] == counts["selective",] < counts["full",]
    assert counts["selective", "save_ops"] == counts["full",]


def test_each_way_down_the_ladder_computes_more_again() -> None:
    counts = {}
    for way in ("none", "cheap", "attention", "full"):
        with _Counting() as counter:
            run("auto", levels=[way] * BLOCKS)
        counts[way] = counter.products, counter.attention
    assert counts["none"] == counts["cheap"]
    assert counts["cheap"][0] < counts["attention"][0] == counts["full"][0]
    assert counts["cheap"][1] == counts["attention"][1] < counts["full"][1]


class _Counting(torch.utils._python_dispatch.TorchDispatchMode):
    products = attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        self.attention += func._overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return func(*args, **(kwargs or {}))


def test_without_gradients_nothing_is_recomputed_or_kept() -> None:
    model = Model().eval()
    apply_recompute(find_wrap_units(model, WrapConfig()), RecomputeConfig(mode="full"))
    with torch.no_grad():
        model(torch.randn(2, 4, 16))
    assert [block.calls for block in model.blocks] == [1] * BLOCKS  # type: ignore[union-attr]


def test_an_operation_that_torch_does_not_have_is_refused() -> None:
    model = Model()
    with refused(ConfigError, "'matmull'", "torch.ops.aten", key="strategy.recompute.save_ops"):
        apply_recompute(
            find_wrap_units(model, WrapConfig()), RecomputeConfig(mode="selective", save_ops=("mm", "matmull"))
        )
    assert "forward" not in vars(model.blocks[0])  # refused before anything was changed


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_running_statistics_move_once(mode: str, compiled: bool) -> None:
    found = []
    for each in ("none", mode):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
        units = find_wrap_units(model, WrapConfig())
        apply_recompute(units, RecomputeConfig(mode=each))  # type: ignore[arg-type]
        for unit in units if compiled else ():
            unit.module.compile(backend="eager")
        for _ in range(2):
            model(torch.randn(3, 4)).square().sum().backward()
        found.append({**model.state_dict(), **{name: p.grad for name, p in model.named_parameters()}})
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


class Fetching(nn.Module):
    """One whose weights are there when it runs first, and have to be fetched when it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            with torch.no_grad(), torch.autograd.profiler.record_function("fetch"):
                self.weight.copy_(self.weight.flip(0).flip(0))
        return (x @ self.weight).sin() @ self.weight


def test_what_is_fetched_in_the_second_pass_alone_does_not_disturb_what_was_kept() -> None:
    module, plain = Fetching(), Fetching()
    apply_recompute([WrapUnit("fetching", module)], RecomputeConfig(mode="selective"))
    x = torch.randn(2, 4)
    for each in (module, plain):
        each(x).square().sum().backward()
    assert (module.calls, plain.calls) == (2, 1)
    assert torch.equal(module.weight.grad, plain.weight.grad)  # type: ignore[arg-type]
