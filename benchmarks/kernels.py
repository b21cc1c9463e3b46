"""Each kernel beside the plain operations it stands for: time, and the share of the memory's speed that it reaches.

python benchmarks/kernels.py
python benchmarks/kernels.py --rows adamw,norm --tokens 16384 --dim 2048
python benchmarks/kernels.py --device cpu --tokens 64 --dim 64     # does every row work?
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import common

BANDWIDTH = 4.8e12
"""Bytes a second of an H200's memory, as its maker states it."""


class Pair(NamedTuple):
    """What is compared, and the bytes that must move at least."""

    plain: Callable[[], Any]
    fused: Callable[[], Any]
    bytes: int


def adamw(given: argparse.Namespace) -> Pair:
    """torch's fused AdamW and the rounding of weights, beside the one pass; gradients in fp32 and in bf16."""
    import torch

    from plait.optim.fused_adam import OnePassAdam

    layers = [(given.dim, given.dim)] * 4 + [(4 * given.dim, given.dim)] * 3 + [(given.dim,)] * 2
    shapes = layers * given.layers
    masters = [torch.nn.Parameter(torch.randn(shape, device=given.device)) for shape in shapes]
    rooms = [torch.nn.Parameter(master.detach().bfloat16()) for master in masters]
    for master, room in zip(masters, rooms, strict=True):
        room.grad = torch.randn_like(room)
        master.grad = room.grad.float()
    theirs = torch.optim.AdamW(masters, fused=True)
    ours = OnePassAdam([torch.nn.Parameter(master.detach().clone()) for master in masters], decoupled=True)
    ours.round_into(dict(zip(ours.param_groups[0]["params"], rooms, strict=True)))

    def plain() -> None:
        theirs.step()
        with torch.no_grad():
            torch._foreach_copy_(rooms, masters)

    return Pair(plain, ours.step, 28 * sum(master.numel() for master in masters))


def _both_ways(function: Callable[..., Any], inputs: list[Any]) -> Callable[[], Any]:
    import torch

    given = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    ups = [torch.randn_like(y) for y in outputs]

    def run() -> None:
        made = function(*given)
        torch.autograd.grad(made if isinstance(made, tuple) else (made,), given, ups)

    return run


def norm(given: argparse.Namespace) -> Pair:
    """The norm of a sum, forward and backward."""
    import torch

    from plait.kernels.rms_norm import add_rms_norm

    x, y = (torch.randn(given.tokens, given.dim, device=given.device).bfloat16() for _ in range(2))
    weight = torch.ones(given.dim, device=given.device).bfloat16()

    def plain(x: Any, y: Any, w: Any) -> Any:
        total = x + y
        return total, torch.nn.functional.rms_norm(total, (given.dim,), w, 1e-5)

    inputs = [x, y, weight]
    return Pair(
        _both_ways(plain, inputs), _both_ways(partial(add_rms_norm, eps=1e-5), inputs), 8 * x.numel() * x.itemsize
    )


def rotation(given: argparse.Namespace) -> Pair:
    """Queries and keys of heads of 64, forward and backward."""
    import torch

    from plait.kernels.rotary import apply_rotary, apply_rotary_plain

    heads = max(1, given.dim // 64)
    q = torch.randn(1, given.tokens, heads, 64, device=given.device).bfloat16()
    k = torch.randn(1, given.tokens, max(1, heads // 4), 64, device=given.device).bfloat16()
    angles = torch.rand(1, given.tokens, 32, device=given.device)
    cos, sin = angles.cos(), angles.sin()

    def plain(q: Any, k: Any) -> Any:
        return apply_rotary_plain(q.transpose(1, 2), cos, sin), apply_rotary_plain(k.transpose(1, 2), cos, sin)

    def fused(q: Any, k: Any) -> Any:
        return apply_rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    return Pair(_both_ways(plain, [q, k]), _both_ways(fused, [q, k]), 4 * 2 * (q.numel() + k.numel()))


def gate(given: argparse.Namespace) -> Pair:
    """silu(gate) * up, forward and backward."""
    import torch

    from plait.kernels.swiglu import swiglu, swiglu_plain

    inputs = [torch.randn(given.tokens, 4 * given.dim, device=given.device).bfloat16() for _ in range(2)]
    return Pair(_both_ways(swiglu_plain, inputs), _both_ways(swiglu, inputs), 8 * 2 * inputs[0].numel())


def linears(given: argparse.Namespace) -> Pair:
    """Queries, keys and values of one input, forward and backward; the products take most of the time."""
    import torch

    from plait.kernels.linears import linears, linears_plain

    x = torch.randn(given.tokens, given.dim, device=given.device).bfloat16()
    widths = (given.dim, max(1, given.dim // 4), max(1, given.dim // 4))
    weights = [torch.randn(width, given.dim, device=given.device).bfloat16() for width in widths]
    moved = 3 * 2 * (x.numel() + sum(weight.numel() + given.tokens * len(weight) for weight in weights))
    return Pair(_both_ways(linears_plain, [x, *weights]), _both_ways(linears, [x, *weights]), moved)


def gated(given: argparse.Namespace) -> Pair:
    """A gate and the layer behind it, forward and backward: the product kept, and made again."""
    import torch

    from plait.kernels.linears import gated_down
    from plait.kernels.swiglu import swiglu

    gate, up = (torch.randn(given.tokens, 4 * given.dim, device=given.device).bfloat16() for _ in range(2))
    weight = torch.randn(given.dim, 4 * given.dim, device=given.device).bfloat16()

    def plain(gate: Any, up: Any, weight: Any) -> Any:
        return torch.nn.functional.linear(swiglu(gate, up), weight)

    inputs = [gate, up, weight]
    moved = 2 * (11 * gate.numel() + 3 * weight.numel() + 3 * given.tokens * given.dim)
    return Pair(_both_ways(plain, inputs), _both_ways(gated_down, inputs), moved)


def scaling(given: argparse.Namespace) -> Pair:
    """The fp32 gradient of a head, times a number, in bf16."""
    import torch

    from plait.kernels.cross_entropy import scaled, scaled_plain

    x = torch.randn(8 * given.tokens, given.dim, device=given.device)
    factor = torch.rand((), device=given.device)
    return Pair(
        partial(scaled_plain, x, factor, torch.bfloat16), partial(scaled, x, factor, torch.bfloat16), 6 * x.numel()
    )


def fp8(given: argparse.Namespace, *, rowwise: bool) -> Pair:
    """A linear layer, forward and backward, in bf16 and in 8 bits; the bytes are those of bf16. Rowwise: compiled."""
    import torch

    from plait.kernels.fp8 import fp8_linear

    x = torch.randn(given.tokens, given.dim, device=given.device).bfloat16()
    weight = torch.randn(4 * given.dim, given.dim, device=given.device).bfloat16()
    emulated = given.device == "cpu"

    def eight(x: Any, weight: Any) -> Any:
        return fp8_linear(x, weight, None, rowwise=rowwise, emulated=emulated)

    fused = torch.compile(eight) if rowwise else eight
    moved = 2 * (2 * x.numel() + 2 * weight.numel() + 2 * given.tokens * len(weight))
    return Pair(_both_ways(torch.nn.functional.linear, [x, weight]), _both_ways(fused, [x, weight]), moved)


def fp8_ffn(given: argparse.Namespace) -> Pair:
    """A gated feed-forward, forward and backward, in bf16 and in 8 bits; the products take most of the time."""
    import torch

    from plait.kernels.fp8_gated import fp8_feed_forward
    from plait.kernels.linears import gated_down, linears

    x = torch.randn(given.tokens, given.dim, device=given.device).bfloat16()
    shapes = (4 * given.dim, given.dim), (4 * given.dim, given.dim), (given.dim, 4 * given.dim)
    weights = [0.02 * torch.randn(shape, device=given.device).bfloat16() for shape in shapes]

    def plain(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return gated_down(*linears(x, gate, up), down)

    eight = partial(fp8_feed_forward, emulated=given.device == "cpu")
    inner = given.tokens * 4 * given.dim
    return Pair(_both_ways(plain, [x, *weights]), _both_ways(eight, [x, *weights]), 10 * inner + 17 * inner)


def fp8_copies(given: argparse.Namespace, *, earlier: bool) -> Pair:
    """A tensor's scale, and its copies in 8 bits both ways. `earlier`: the scale is known, the next one is noted."""
    import torch

    from plait.kernels.fp8 import E4M3, amax_of, amax_plain, fp8_cast, fp8_cast_plain

    x = [torch.randn(given.tokens, given.dim, device=given.device).bfloat16()]

    def plain() -> Any:
        return fp8_cast_plain(x, amax_plain(x), E4M3, rows=True, columns=True)

    known, notes = amax_of(x).amax(0, keepdim=True), torch.zeros(1, dtype=torch.int32, device=given.device)

    def fused() -> Any:
        if earlier:
            return fp8_cast(x, known, E4M3, rows=True, columns=True, amax_bits=notes, saturates=True)
        return fp8_cast(x, amax_of(x), E4M3, rows=True, columns=True)

    return Pair(plain, fused, (4 if earlier else 6) * x[0].numel())


def fp8_slopes(given: argparse.Namespace, *, earlier: bool) -> Pair:
    """The backward pass between the products of a gated feed-forward in 8 bits. `earlier`: as in `fp8_copies`."""
    import torch

    from plait.kernels.fp8_gated import cast_slopes, cast_slopes_plain, gate_amax, gate_amax_plain

    inputs = [torch.randn(given.tokens, 4 * given.dim, device=given.device).bfloat16() for _ in range(3)]
    known = gate_amax(*inputs[:2])

    def plain() -> Any:
        return cast_slopes_plain(*inputs, (known, gate_amax_plain(*inputs)), rows=True)

    both = known.amax(0, keepdim=True), gate_amax(*inputs).amax(0, keepdim=True)
    notes = torch.zeros(2, dtype=torch.int32, device=given.device)

    def fused() -> Any:
        if earlier:
            return cast_slopes(*inputs, both, rows=True, amax_bits=notes, saturates=True)
        return cast_slopes(*inputs, (known, gate_amax(*inputs)), rows=True)

    return Pair(plain, fused, (11 if earlier else 17) * inputs[0].numel())


def fp8_head(given: argparse.Namespace) -> Pair:
    """The loss of a language model from its last hidden states, with backward products in 16 bits and in 8."""
    import torch

    from plait.models.common.losses import Fp8Head, linear_cross_entropy

    hidden, weight = (torch.randn(n, given.dim, device=given.device) for n in (given.tokens, given.words))
    labels = torch.randint(given.words, (given.tokens,), device=given.device)
    inputs = [hidden.bfloat16().requires_grad_(), (0.02 * weight).bfloat16().requires_grad_()]

    def run(fp8: Fp8Head | None) -> Any:
        return torch.autograd.grad(linear_cross_entropy(*inputs, labels, fp8=fp8).sum, inputs)

    # Of each logit, beside its products: read twice, and written in 8 bits twice.
    eight = Fp8Head(emulated=given.device == "cpu")
    return Pair(partial(run, None), partial(run, eight), 6 * given.tokens * given.words)


ROWS: dict[str, tuple[str, Callable[[argparse.Namespace], Pair]]] = {
    "adamw": ("AdamW, bf16 gradients, rounded weights", adamw),
    "norm": ("add and RMSNorm, both ways", norm),
    "rotation": ("rotation of queries and keys, both ways", rotation),
    "gate": ("SwiGLU, both ways", gate),
    "linears": ("queries, keys and values, both ways", linears),
    "gated": ("SwiGLU and the layer behind it, both ways", gated),
    "scaling": ("fp32 times a number, in bf16", scaling),
    "fp8": ("linear layer in fp8, tensorwise, both ways", partial(fp8, rowwise=False)),
    "fp8-ffn": ("gated feed-forward in fp8, both ways", fp8_ffn),
    "fp8-cast": ("scale and copies in fp8", partial(fp8_copies, earlier=False)),
    "fp8-cast-earlier": ("copies in fp8, scale known", partial(fp8_copies, earlier=True)),
    "fp8-slopes": ("gradients of a gate in fp8", partial(fp8_slopes, earlier=False)),
    "fp8-slopes-earlier": ("gradients of a gate in fp8, scales known", partial(fp8_slopes, earlier=True)),
    "fp8-head": ("head and loss, backward in fp8", fp8_head),
    "fp8-rowwise": ("linear layer in fp8, rowwise, both ways", partial(fp8, rowwise=True)),
}


def milliseconds(run: Callable[[], Any], given: argparse.Namespace) -> float:
    """The median of some runs, each waited for."""
    import torch

    times = []
    for _ in range(given.steps + 3):
        if given.device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if given.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 1e3 * sorted(times[3:])[given.steps // 2]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", default=",".join(ROWS))
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--tokens", type=int, default=16384)
    options.add_argument("--dim", type=int, default=2048)
    options.add_argument("--words", type=int, default=128256, help="of the vocabulary that the head knows")
    options.add_argument("--layers", type=int, default=8, help="layers whose weights AdamW updates")
    options.add_argument("--steps", type=int, default=20)
    given = options.parse_args()
    lines = []
    for name in common.chosen(given.rows, list(ROWS)):
        label, make = ROWS[name]
        pair = make(given)
        plain, fused = milliseconds(pair.plain, given), milliseconds(pair.fused, given)
        share = f"{pair.bytes / (fused * 1e-3) / BANDWIDTH:.0%}" if given.device == "cuda" else "–"
        lines.append([label, f"{plain:.3f}", f"{fused:.3f}", f"{plain / fused:.2f}×", share])
        del pair
    print(common.table(["what", "plain, ms", "fused, ms", "faster", "of 4.8 TB/s"], lines))


if __name__ == "__main__":
    main()
