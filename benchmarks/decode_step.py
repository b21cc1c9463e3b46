"""Where the time of one token goes when a Llama writes, and what each trick is worth. For a GPU.

    python benchmarks/decode_step.py                   # the 1B in bf16: 8, 32 and 128 rows, all ways
    python benchmarks/decode_step.py --rows 128 --ways now,no-ahead --kernels
    python benchmarks/decode_step.py --rows 8,32,128 --ways now,sampled,sampled-logits
    python benchmarks/decode_step.py --device cpu --size tiny --rows 2 --ways now,sampled       # whether it runs

A step of `plait.generate.cached` is recorded as a CUDA graph and repeated, with the cache as full as in the middle of
256 new tokens behind prompts of about 96. `floor` is how long the memory needs for the weights and the cache at
4.1 TB/s; `reading` is what the prompts take, divided by 256. Each way is the usual one, `now`, which takes the
likeliest token, with one thing changed. Kernels are compiled by several processes at once. `--kernels` shows what a
profiler says of each kernel. On the CPU the kernels' plain twins do it, in fp32 and without a recording.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import timeit
from collections.abc import Callable
from typing import Any

SPEED = 4.1e12
"""Bytes a second that an H200 reads."""
SLOTS, PLACE, NEW = 384, 224, 256
SEED = 3
Step = Callable[[], None]


class Case:
    """A model, rows with a cache, and what is noted about them."""

    def __init__(self, rows: int, size: str, device: str, layers: int | None = None) -> None:
        import torch

        from plait.generate.batch import Answers
        from plait.generate.options import Sampling
        from plait.kernels.decode.embed_sample import RowPositions
        from plait.models import build_model, preset

        changes = {} if layers is None else {"layers": layers}
        config: Any = preset("llama", size, seq_len=4096, **changes)
        self.device, dtype = torch.device(device), torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(SEED)
        with self.device:
            self.model = build_model(config).to(dtype).requires_grad_(False).eval()
            place = torch.full((rows,), PLACE)
            self.at = RowPositions(place.clone(), place.clone(), place)  # rows that are full stay where they are
            shape = (rows, config.kv_heads, SLOTS, config.dim // config.heads)
            self.caches = [tuple(torch.randn(2, *shape, dtype=dtype)) for _ in range(config.layers)]
        self.answers = Answers([[1]] * rows, range(rows), [NEW] * rows, Sampling(NEW, temperature=0.0), self.device)
        self.answers.done.fill_(True)  # so that they are noted in the last column, however often
        weights = sum(each.numel() for each in self.model.parameters())
        seen = config.layers * 2 * rows * config.kv_heads * PLACE * shape[3]
        self.floor = dtype.itemsize * (weights + seen) / SPEED

    def step(self, way: str) -> Step:
        """One token for each row, in one of the ways."""
        from plait.generate.cached import LlamaDecodeStep
        from plait.kernels.decode.dependent_launch import PREFETCH_BYTES
        from plait.kernels.decode.sampling import CounterRNG, sample_tokens_plain
        from plait.kernels.decode.tokens import TokenRecords, record_tokens_plain

        options: dict[str, Any] = {
            "no-ahead": {"prefetch_bytes": 0},
            "ahead": {"prefetch_bytes": PREFETCH_BYTES},
            "more-ahead": {"prefetch_bytes": 2 * PREFETCH_BYTES},
            "late": {"early": False},
        }.get(way, {})
        quick, answers = LlamaDecodeStep(self.model, SLOTS, **options), self.answers
        rng = CounterRNG(answers.keys, answers.counts, SEED)

        def call() -> None:
            if way == "logits":
                answers.take(quick(answers.token, self.at, self.caches))
                return
            if way == "sampled":
                found = quick.step_sample(answers.token, self.at, self.caches, 1.0, rng)
            elif way == "sampled-logits":
                found = sample_tokens_plain(quick(answers.token, self.at, self.caches), 1.0, rng)
            else:
                found = quick.step_greedy(answers.token, self.at, self.caches)
            if way == "plain-notes":
                a = answers
                state = (a.token, a.tokens, a.logprobs, a.counts, a.limits, a.done, a.stopped, a.counts[:0])
                record_tokens_plain(*found, TokenRecords(*state))
            else:
                answers.record(*found)

        return call

    def reading(self) -> float:
        """Seconds for prompts of 64 to 128 tokens."""
        import torch

        from plait.generate.cached import CachedDecoder

        decoder, rows = CachedDecoder(self.model, self.device), len(self.answers.done)
        prompts = [[1] * (64 + 64 * row // rows) for row in range(rows)]
        best = float("inf")
        with torch.no_grad():
            for _ in range(3):
                wait_for(self.device.type)
                begun = time.perf_counter()
                decoder.begin(prompts, [NEW] * rows)
                wait_for(self.device.type)
                best = min(best, time.perf_counter() - begun)
        decoder.close()
        return best


TRICKS = ("no-ahead", "ahead", "more-ahead", "late", "logits", "plain-notes", "unchained")
WAYS = ("now", *TRICKS, "sampled", "sampled-logits")
"""`ahead`: also with few rows. `late`: no early loads. `logits`: they are written, and read again. `plain-notes`: torch
writes down. `unchained`: no kernel begins before the one before has ended. `sampled`: a token is drawn from all at
temperature 1, as generation does it. `sampled-logits`: torch draws it, in several passes over all logits."""


def wait_for(device: str) -> None:
    """Until a device has done what it was asked for."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def set_chaining(on: bool) -> None:
    """Whether kernels may run in a chain, for this process."""
    from plait.kernels.decode import dependent_launch

    dependent_launch.HAS_DEPENDENT_LAUNCH = on


def compile_some(jobs: list[tuple[int, str]], size: str) -> None:
    """Let Triton make the kernels of some steps; it keeps them."""
    import torch

    for rows, way in jobs:
        set_chaining(way != "unchained")
        with torch.no_grad():
            Case(rows, size, "cuda", layers=2).step(way)()
        torch.cuda.synchronize()


def compile_all(jobs: list[tuple[int, str]], size: str, processes: int) -> None:
    """The kernels of all steps, by several processes."""
    context = multiprocessing.get_context("spawn")
    parts = [jobs[number::processes] for number in range(min(processes, len(jobs)))]
    workers = [context.Process(target=compile_some, args=(part, size)) for part in parts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def seconds_of(step: Step, turns: int, device: str) -> float:
    """The best of some dozens of repeated steps, without what begins the first of them."""
    import torch

    from plait.kernels.cuda_graphs import capture_graph

    step()
    if device == "cpu":
        return min(timeit.repeat(step, number=1, repeat=16 * turns))
    graph, best = capture_graph(step), float("inf")
    for _ in range(turns):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(16):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 16000)
    return best


def kernels_of(step: Step) -> list[str]:
    """Lines about each kernel of a recorded step: how often, and how long each time and together."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from plait.kernels.cuda_graphs import capture_graph

    step()
    graph = capture_graph(step)
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in seen.events():
        found.setdefault(event.name, []).append(event.device_time)
    ranked = sorted(found.items(), key=lambda one: -sum(one[1]))
    return [f"    {len(t):4} x {sum(t) / len(t):7.1f} us = {sum(t):7.0f}  {name[:60]}" for name, t in ranked]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--size", choices=("tiny", "1b", "3b", "8b"), default="1b")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--rows", default="8,32,128")
    options.add_argument("--ways", default=",".join(WAYS))
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--processes", type=int, default=12)
    options.add_argument("--kernels", action="store_true")
    given = options.parse_args()
    ways = given.ways.split(",")
    if strange := set(ways) - set(WAYS):
        options.error(f"--ways has {', '.join(sorted(strange))}; it is among {', '.join(WAYS)}")
    if given.kernels and given.device == "cpu":
        options.error("--kernels needs a GPU")
    jobs = [(int(rows), way) for rows in given.rows.split(",") for way in ways]
    begun = time.perf_counter()
    if given.device == "cuda":
        compile_all(jobs, given.size, given.processes)
        print(f"{len(jobs)} steps compiled in {time.perf_counter() - begun:.0f} s", flush=True)

    import torch

    with torch.no_grad():
        for rows in dict.fromkeys(rows for rows, _ in jobs):
            case = Case(rows, given.size, given.device)
            reading = 1e6 * case.reading() / NEW
            print(f"{rows} rows: floor {1e6 * case.floor:.0f} us, reading {reading:.0f} us a token", flush=True)
            for way in ways:
                set_chaining(way != "unchained")
                seconds = seconds_of(case.step(way), given.turns, given.device)
                print(f"  {way:14} {1e6 * seconds:7.0f} us", flush=True)
                if given.kernels:
                    print(*kernels_of(case.step(way)), sep="\n", flush=True)
            del case
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
