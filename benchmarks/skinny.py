"""Looks for the fastest tiles of `plait.kernels.decode.skinny_gemm` and of the attention beside it on this GPU, for one
Llama's shapes.

    python benchmarks/skinny.py                       # the 1B: 8, 32, 64 and 128 rows, all forms
    python benchmarks/skinny.py --rows 8,128 --forms gated,add

Each candidate multiplies with many weights in turn, recorded in one CUDA graph, so that none is found in a cache: that
is how a decoder meets them. Candidates are compiled by several processes at once; Triton keeps what they make. The last
lines are entries for `CONFIGS`; those of attention are for `DEFAULT_CONFIG` and `MANY_ROWS_CONFIG` of
`plait.kernels.decode.attention`. `torch` beside them is the plain twin: where it is faster, `None` is the better entry.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

SHAPES = {"1b": (2048, 512, 8192, 128256), "8b": (4096, 1024, 14336, 128256)}
"""Width, features of keys, width of the feed-forward, vocabulary."""
DEVICE = "cuda"
FORMS = ("project", "add", "gated", "wide", "attention")
HEAD, SLOTS, PLACE = 64, 384, 224
"""Width of a head, and how full the cache is in the middle of 256 new tokens."""
SHARED = 225 * 1024
"""Bytes that the tiles of one program may take."""


def candidates(form: str, rows: int) -> Iterator[Any]:
    """What is worth a try."""
    from plait.kernels.decode.skinny_gemm import CONFIGS, GemmConfig

    if form == "attention":
        from plait.kernels.decode.attention import AttentionConfig

        four = ((64, 4, 3), (64, 4, 2), (32, 4, 3), (32, 4, 4), (128, 4, 2))
        fewer = ((32, 2, 3), (32, 2, 4), (64, 2, 2), (64, 2, 3), (32, 1, 3), (32, 1, 4), (64, 1, 2))
        programs = (132, 264, 528) if rows < 64 else (528,)
        yield from (AttentionConfig(*shape, most) for shape in (*four, *fewer) for most in programs)
        return
    padded = max(16, 1 << (rows - 1).bit_length())
    if (usual := CONFIGS.get((form, padded))) is not None:
        yield usual
    few = {"project": (16, 32, 64), "add": (16, 32, 64), "gated": (16, 32, 64), "wide": (32, 64, 128)}[form]
    many = {"project": (32, 64, 128), "add": (32, 64, 128), "gated": (32, 64, 128), "wide": (64, 128, 256)}[form]
    for n, k in itertools.product(few if padded <= 32 else many, (128, 256) if padded <= 32 else (64, 128)):
        columns = n * (2 if form == "gated" else 1)
        stages = min(6, SHARED // (2 * k * (padded + columns)))
        shares = form in ("project", "add")
        for programs in (132, 264, 528) if shares else (0,):
            for warps in (2 if columns * padded <= 256 else 4,) if shares else (4, 8):
                # Programs that share a part of the device may each hold less.
                for depth in sorted({min(4, stages)} if programs not in (0, 264) else {stages, min(4, stages)}):
                    yield GemmConfig(n, k, warps, depth, programs)


def make_call(form: str, rows: int, size: str, copies: int) -> tuple[Callable[[Any], None], int]:
    """A function that multiplies with every copy once, by a table; and the bytes of the weights."""
    import torch

    from plait.kernels.decode import embed_sample, skinny_gemm
    from plait.kernels.decode.step import MANY_ROWS

    if form == "attention":
        return make_attention(rows, size, copies)
    width, kv, hidden, vocabulary = SHAPES[size]
    features = {"project": [width, kv, kv], "add": [hidden], "gated": [hidden, hidden], "wide": [vocabulary]}[form]

    def made(*shape: int) -> Any:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) / 32

    counters, norm = skinny_gemm.make_counters(torch.device(DEVICE)), skinny_gemm.Norm(made(width), 1e-5)
    tokens = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    stream = embed_sample.embed(tokens, made(4, width), norm)
    shapes = [[(each, width) for each in features]]
    if form == "add":  # out of attention and out of the feed-forward, as often
        shapes = [[(width, each)] for each in (hidden, width)]
    weights = [[made(*shape) for shape in shapes[copy % len(shapes)]] for copy in range(copies)]
    inputs = {each: made(rows, each) for each in (hidden, width)}

    def call(table: Any) -> None:
        for own, later in itertools.pairwise([*weights, weights[0]]):
            prefetch = skinny_gemm.prefetch_of(form, rows, later, table=table) if rows >= MANY_ROWS else None
            if form == "gated":
                skinny_gemm.gated(stream, *own, table=table, prefetch=prefetch)
            elif form == "add":
                skinny_gemm.add(stream, inputs[own[0].shape[1]], own[0], norm, counters, table=table, prefetch=prefetch)
            else:
                skinny_gemm.project(stream, own, counters, table=table, prefetch=prefetch)

    return call, sum(each.numel() * each.itemsize for own in weights for each in own)


def make_attention(rows: int, size: str, copies: int) -> tuple[Callable[[Any], None], int]:
    """The same for attention, by the only entry of a table; and the bytes that it reads of caches."""
    import torch

    from plait.kernels.decode.attention import attend_cached, attend_cached_plain
    from plait.kernels.decode.skinny_gemm import make_counters

    width, kv, *_ = SHAPES[size]
    counters, places = make_counters(torch.device(DEVICE)), torch.full((rows,), PLACE, device=DEVICE)
    caches = torch.randn(copies, 2, rows, kv // HEAD, SLOTS, HEAD, device=DEVICE, dtype=torch.bfloat16)
    table = torch.rand(2, SLOTS, HEAD // 2, device=DEVICE)
    qkv = torch.randn(rows, width + 2 * kv, device=DEVICE, dtype=torch.bfloat16)

    def call(given: Any) -> None:
        (config,) = given.values()
        for keys, values in caches:
            if config is None:
                attend_cached_plain(qkv, *table, keys, values, places)
            else:
                attend_cached(qkv, *table, keys, values, places, counters, config=config)

    return call, caches.numel() * caches.itemsize * PLACE // SLOTS


def table_of(form: str, rows: int, config: Any) -> Any:
    """A table with one entry."""
    return {(form, max(16, 1 << (rows - 1).bit_length())): config}


def table_in_use(form: str, rows: int) -> Any:
    """What is taken as things stand."""
    from plait.kernels.decode.attention import DEFAULT_CONFIG, MANY_PROGRAMS, MANY_ROWS_CONFIG
    from plait.kernels.decode.skinny_gemm import CONFIGS

    if form == "attention":
        return MANY_ROWS_CONFIG if rows * SHAPES["1b"][1] // HEAD > MANY_PROGRAMS else DEFAULT_CONFIG
    return CONFIGS.get((form, max(16, 1 << (rows - 1).bit_length())))


def compile_some(jobs: list[tuple[str, int, Any]], size: str) -> None:
    """Let Triton make kernels; those that do not fit the device are left out later."""
    calls: dict[tuple[str, int], Any] = {}
    for form, rows, config in jobs:
        if (form, rows) not in calls:
            calls[form, rows] = make_call(form, rows, size, 2 if form == "add" else 1)[0]
        try:
            calls[form, rows](table_of(form, rows, config))
        except Exception:  # said where it is measured
            continue


def seconds_of(call: Callable[[], None], turns: int) -> float:
    """The best of several replays."""
    import torch

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    best = float("inf")
    for _ in range(turns):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000)
    return best


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--size", choices=SHAPES, default="1b")
    options.add_argument("--rows", default="8,32,64,128")
    options.add_argument("--forms", default=",".join(FORMS))
    options.add_argument("--processes", type=int, default=14)
    options.add_argument("--turns", type=int, default=5)
    given = options.parse_args()
    pairs = [(form, int(rows)) for form in given.forms.split(",") for rows in given.rows.split(",")]
    jobs = [(form, rows, config) for form, rows in pairs for config in dict.fromkeys(candidates(form, rows))]
    begun = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=compile_some, args=(jobs[number :: given.processes], given.size))
        for number in range(given.processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"{len(jobs)} candidates compiled in {time.perf_counter() - begun:.0f} s", flush=True)
    entries = []
    for form, rows in pairs:
        copies = 2 if form == "wide" else 16
        call, size = make_call(form, rows, given.size, copies)
        found: list[tuple[float, Any]] = []
        for config in [None, *(config for f, r, config in jobs if (f, r) == (form, rows))]:
            try:
                found.append((seconds_of(partial(call, table_of(form, rows, config)), given.turns), config))
            except Exception as error:  # too large for the device: the others go on
                print(f"{form} {rows} {config}: {type(error).__name__}")
        plain, ranked = found[0][0], sorted(found[1:], key=lambda one: one[0])
        if not ranked:
            continue
        best, config = ranked[0]
        print(
            f"{form} {rows}: torch {1e6 * plain / copies:.1f} us, best {1e6 * best / copies:.1f} "
            f"({size / best / 1e12:.2f} TB/s); in use {table_in_use(form, rows)}",
            flush=True,
        )
        for seconds, other in ranked[:5]:
            print(f"    {1e6 * seconds / copies:.1f} {other}")
        entries.append(f"    {(form, max(16, 1 << (rows - 1).bit_length()))}: {config},")
    print(f"{time.perf_counter() - begun:.0f} s", *entries, sep="\n")


if __name__ == "__main__":
    main()
