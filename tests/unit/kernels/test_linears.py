"""Layers that share an input, and a feed-forward that keeps less: what is computed, what is kept, who is left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from plait.config.model import LlamaConfig
from plait.kernels.linears import (
    apply_linears,
    bypassed_layers,
    feed_forward,
    gated_down,
    gated_down_plain,
    is_plain,
    linears,
    linears_plain,
)
from plait.models import build_model
from plait.models.fused import fuse
from plait.profile.marks import ModuleStack, module_marks


class Operations(TorchDispatchMode):
    """Counts what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum(self.seen[name] for name in ("mm", "addmm", "addmm_"))


@contextmanager
def kept() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of what is saved for the backward pass."""
    shapes: list[tuple[int, ...]] = []

    def pack(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield shapes


def some(*shape: int, learns: bool = True) -> Tensor:
    return torch.randn(shape).requires_grad_(learns)


def same(ours: Callable[[], Any], theirs: Callable[[], Any], leaves: list[Tensor], near: float = 1e-5) -> None:
    """Answers and gradients of both; a leaf that has none with one has none with the other."""
    results = []
    for function in (ours, theirs):
        outputs = function()
        outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
        total = sum((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in outputs)
        total.backward()  # type: ignore[union-attr]
        results.append([*outputs, *(leaf.grad for leaf in leaves)])
        for leaf in leaves:
            leaf.grad = None
    for found, wanted in zip(*results, strict=True):
        assert (found is None) == (wanted is None)
        if wanted is not None:
            assert found.dtype == wanted.dtype
            assert (found - wanted).norm() <= near * wanted.norm()


def test_gradients_of_a_shared_input_are_added_within_the_products() -> None:
    x, weights = some(2, 5, 8), [some(width, 8) for width in (6, 4, 4)]
    outputs = linears(x, *weights)
    with Operations() as run:
        torch.autograd.grad(outputs, [x, *weights], [torch.randn_like(y) for y in outputs])
    assert (run.seen["mm"], run.seen["addmm_"], run.seen["add"]) == (4, 2, 0)


@pytest.mark.parametrize("frozen", [(0,), (1,), (1, 2, 3), (0, 2)], ids=str)
def test_what_is_frozen_has_no_gradient_and_costs_nothing(frozen: tuple[int, ...]) -> None:
    leaves = [some(3, 8), some(6, 8), some(4, 8), some(4, 8)]
    for index in frozen:
        leaves[index].requires_grad_(False)
    same(lambda: linears(*leaves), lambda: linears_plain(*leaves), leaves)
    with kept() as ours:
        linears(*leaves)
    with kept() as theirs:
        linears_plain(*leaves)
    assert set(map(sorted_shape, ours)) <= set(map(sorted_shape, theirs))  # of a product it may be turned


def sorted_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(shape))


def test_an_answer_that_nobody_uses_takes_no_part() -> None:
    x, *weights = leaves = [some(3, 8), some(6, 8), some(4, 8)]
    same(lambda: linears(x, *weights)[1], lambda: linears_plain(x, *weights)[1], leaves)


def test_autocast_decides_as_it_does_for_one_layer() -> None:
    x, gate, up, down = leaves = [some(2, 5, 16), some(24, 16), some(24, 16), some(16, 24)]

    def ours() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return gated_down(*linears(x, gate, up), down)

    def theirs() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return gated_down_plain(*linears_plain(x, gate, up), down)

    assert ours().dtype == torch.bfloat16
    same(ours, theirs, leaves, near=0.03)


@pytest.mark.parametrize("frozen", [(), (2,), (0, 1), (0,)], ids=str)
def test_a_gated_product_is_not_kept(frozen: tuple[int, ...]) -> None:
    leaves = gate, up, down = [some(2, 5, 24), some(2, 5, 24), some(16, 24)]
    for index in frozen:
        leaves[index].requires_grad_(False)
    same(lambda: gated_down(gate, up, down), lambda: gated_down_plain(gate, up, down), leaves)
    with kept() as ours:
        gated_down(gate, up, down)
    assert ours.count((2, 5, 24)) == 2
    assert ours.count((16, 24)) <= 1
    assert len(ours) <= 3


def test_recomputing_a_feed_forward_does_not_make_its_last_product_again() -> None:
    gate, up, down = nn.Linear(8, 20, bias=False), nn.Linear(8, 20, bias=False), nn.Linear(20, 8, bias=False)
    x = some(3, 8)
    products = []
    for forward in (
        lambda x: feed_forward(x, gate, up, down),
        lambda x: down(F.silu(gate(x)) * up(x)),
    ):
        with Operations() as run:
            checkpoint(forward, x, use_reentrant=False).sum().backward()
        products.append(run.products)
    assert products == [11, 11]  # three forward, two again, six back


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def _with_hook(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_hook(lambda module, inputs, output: output * 3)
    return layer


def _with_another_forward(layer: nn.Linear) -> nn.Linear:
    layer.forward = lambda x: F.linear(x, layer.weight) + 1  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    "strange",
    [
        lambda n, m: nn.Linear(n, m),
        lambda n, m: Halved(n, m, bias=False),
        lambda n, m: _with_hook(nn.Linear(n, m, bias=False)),
        lambda n, m: _with_another_forward(nn.Linear(n, m, bias=False)),
        lambda n, m: nn.utils.parametrizations.weight_norm(nn.Linear(n, m, bias=False)),
    ],
    ids=["bias", "class", "hook", "forward", "parametrized"],
)
def test_a_layer_that_does_more_than_multiply_is_called(strange: Callable[[int, int], nn.Module]) -> None:
    x, plain, other, last = some(3, 8), nn.Linear(8, 20, bias=False), strange(8, 20), strange(20, 8)
    assert is_plain(plain)
    assert not is_plain(other)
    same(lambda: apply_linears(x, (plain, other)), lambda: [plain(x), other(x)], [x, *plain.parameters()])
    same(lambda: feed_forward(x, plain, other, last), lambda: last(F.silu(plain(x)) * other(x)), [x])


def test_looking_at_a_model_does_not_change_what_its_layers_do() -> None:
    sizes: dict[str, Any] = {"vocab_size": 20, "dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 24}
    model = build_model(LlamaConfig(**sizes))
    assert bypassed_layers(model) == set()
    fuse(model)
    block: Any = model.get_submodule("blocks.0")
    together = {block.attention.q, block.attention.k, block.attention.v, block.ffn.gate, block.ffn.up, block.ffn.down}
    assert bypassed_layers(model) == together
    with module_marks(model, ModuleStack()):
        assert bypassed_layers(model) == together
        assert not is_plain(block.attention.out)
    _with_hook(block.attention.q)
    assert bypassed_layers(model) == {block.ffn.gate, block.ffn.up, block.ffn.down}
