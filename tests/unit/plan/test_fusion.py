"""What compiling would do: which kernels there are, and what is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from plait.config import parse_sections
from plait.distributed.fake import fake_world
from plait.models.llama import SwiGLU
from plait.plan.compiled import FusedGraph, _Fused
from plait.plan.hardware import find_hardware
from plait.plan.recorder import MemoryRecorder
from plait.plan.timing import Timing

CONFIG = parse_sections().config
ROWS, WIDTH = 12, 24


@pytest.fixture
def counters() -> Any:
    """A recorder and a timing, in a fake world."""
    with fake_world(CONFIG) as world:
        timing = Timing(find_hardware("cpu"), CONFIG, world.layout)
        recorder = MemoryRecorder("cpu", watchers=(timing,))
        with recorder.recording():
            yield recorder, timing


def fused(counters: Any, function: Callable[..., Any], *shapes: tuple[int, ...]) -> FusedGraph:
    recorder, timing = counters
    with recorder.nested():
        graph = make_fx(lambda *given: [function(*given)])(*(torch.empty(shape) for shape in shapes))
    for place, node in enumerate(node for node in graph.graph.nodes if node.op == "placeholder"):
        node.name = f"primals_{place + 1}"  # as AOTAutograd calls what its caller holds on to
    return FusedGraph(graph, recorder, timing)


def kernels(graph: FusedGraph) -> list[str]:
    return [str(node.target.overloadpacket).removeprefix("aten.") for node in graph._kernels]


def test_a_chain_between_two_products_is_one_kernel(counters: Any) -> None:
    graph = fused(counters, lambda x, w, v: (x @ w).sigmoid().mul(2).add(1) @ v, (4, 8), (8, 16), (16, 2))
    assert kernels(graph) == ["mm", "add", "mm"]


def test_what_is_cheap_is_computed_wherever_it_is_wanted(counters: Any) -> None:
    def twice(x: Tensor, w: Tensor) -> Tensor:
        scaled = x * 3  # read by the product, which must find it in memory, and by what comes after
        return (scaled @ w) + scaled

    assert kernels(fused(counters, twice, (8, 8), (8, 8))) == ["mul", "mm", "add"]
    assert kernels(fused(counters, lambda x, w: (x @ w) + x * 3, (8, 8), (8, 8))) == ["mm", "add"]


def test_a_reduction_waits_until_someone_wants_it(counters: Any) -> None:
    graph = fused(counters, lambda x, w: (x @ w) * x.sum(-1, keepdim=True), (8, 8), (8, 8))
    assert kernels(graph) == ["mm", "mul"]
    assert graph._levels[next(node for node in graph._nodes if node.name.startswith("sum"))] == 1


def test_memory_rises_by_what_lies_between_kernels_and_no_further(counters: Any) -> None:
    graph = fused(counters, lambda x, w, v: (x @ w).sigmoid().mul(2) @ v, (4, 8), (8, 16), (16, 2))
    # The first product and what is made of it are there at once; the first is gone when the second product runs.
    assert graph._rise == 4 * (4 * 16 + 4 * 16)


def test_a_call_makes_outputs_of_the_right_form_and_counts_the_products(counters: Any) -> None:
    recorder, timing = counters
    graph = fused(counters, lambda x, w: (x @ w).relu().t(), (4, 8), (8, 16))
    timing.restart()
    given = [torch.empty(4, 8), torch.empty(8, 16)]
    (out,) = graph(given)
    assert (out.shape, out.stride()) == ((16, 4), (1, 16))
    assert not given
    assert timing.numbers["flops"] == 2 * 4 * 8 * 16
    assert max(peak.bytes for peak in recorder.peaks.values()) >= graph._rise


class WithAttention(nn.Module):
    """Causal attention of two heads, and a gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.ffn = SwiGLU(WIDTH, 40, layers=1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(1, ROWS, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(ROWS, WIDTH)
        out: Tensor = x + self.ffn(x)
        return out


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH), nn.Softmax(-1))


def kept_for_backward(call: Callable[[], Tensor], known: list[Tensor]) -> list[int]:
    """Bytes of what a call saves, beside what is there anyway."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = call()
    own = {tensor.untyped_storage()._cdata for tensor in known}
    sizes = sorted(size for key, size in kept.items() if key not in own)
    del held
    return sizes


@pytest.mark.parametrize("make", [feed_forward, WithAttention])
def test_what_is_kept_is_what_a_module_that_is_really_compiled_keeps(make: Callable[[], nn.Module]) -> None:
    module, given = make(), torch.randn(ROWS, WIDTH, requires_grad=True)
    compiled = torch.compile(module, backend="aot_eager_decomp_partition")
    compiled(given)
    real = kept_for_backward(lambda: compiled(given), [given, *module.parameters()])
    with fake_world(CONFIG) as world:
        module, given = make(), torch.randn(ROWS, WIDTH, requires_grad=True)
        timing = Timing(find_hardware("cpu"), CONFIG, world.layout)
        recorder = MemoryRecorder("cpu", watchers=(timing,))
        with recorder.recording():
            counted = _Fused(module, traces={}, recorder=recorder, timing=timing)
            simulated = kept_for_backward(lambda: counted(given), [given, *module.parameters()])
    assert simulated == real
    assert real
