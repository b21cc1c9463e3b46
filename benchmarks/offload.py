"""Training with the optimizer beyond the GPU: Plait's tiers beside DeepSpeed's ZeRO-Offload, on the same Llama.

    python benchmarks/offload.py --rows plait-cpu,plait-auto,ds2,ds3       # 3B and 8B: tokens a second and memory
    python benchmarks/offload.py --rows 3b/plait-cpu,3b/plait-auto,3b/ds2,3b/ds3,8b/plait-auto,8b/ds2 --total 380
    python benchmarks/offload.py --sizes 8b --rows plait-cpu --profile overlap.json
    python benchmarks/offload.py --sizes 27b --rows plait-mix8 --seq 1024 --batch 1 --recompute --warmup 1 --steps 2
    python benchmarks/offload.py --sizes tiny --device cpu                 # does every row work?
    python benchmarks/offload.py … --expect                                # only say how long each row should take

bf16 compute on fp32 weights, AdamW, gradients clipped to norm 1; one plain Llama for all rows, each row in a process of
its own, with a time limit, told when it is done. `host GiB` is the process's highest resident memory. `--profile`
records two steps of each Plait row and says which share of the copies ran while the GPU computed. What a row should
take is said first, by the plan's own account of the update; DeepSpeed's rows are expected to take as long as Plait's.
A row that would take all of the host's memory is stopped, and says so. Numbers go to `--json` after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import common
from common import Result, median
from offload_aside import CpuAdam, stay_within
from offload_overlap import overlap

ADAM = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
SIZES: dict[str, dict[str, Any]] = {
    "8b": {"layers": 32, "dim": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "tied": False},
    "10b": {"layers": 40, "dim": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "tied": False},
    "12b": {"layers": 48, "dim": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "tied": False},
    "14b": {"layers": 40, "dim": 5120, "heads": 40, "kv_heads": 8, "ffn": 17408, "tied": False},
    "20b": {"layers": 48, "dim": 5632, "heads": 44, "kv_heads": 4, "ffn": 19712, "tied": False},
    "27b": {"layers": 56, "dim": 6144, "heads": 48, "kv_heads": 8, "ffn": 20480, "tied": False},
    "30b": {"layers": 62, "dim": 6144, "heads": 48, "kv_heads": 8, "ffn": 20480, "tied": False},
    "34b": {"layers": 60, "dim": 7168, "heads": 56, "kv_heads": 8, "ffn": 20480, "tied": False},
}
"""Those that `nets.LLAMAS` does not have; all with the vocabulary of Llama 3."""
Step = Callable[[Any, Any], Any]


def size_of(name: str) -> Any:
    """A Llama by name."""
    from nets import LLAMAS, LlamaSize

    return LLAMAS[name] if name in LLAMAS else LlamaSize(vocab=128256, **SIZES[name])


# ---- Plait


def plait(
    offload: dict[str, Any] | None, *, zero: int | None = None, optim: str = "AdamW", master: bool = True
) -> Callable[..., Step]:
    """Plait's engine with a tier; without `master` the weights themselves are all there is of them."""

    def start(given: argparse.Namespace) -> Step:
        from nets import Llama

        import plait as library

        strategy: dict[str, Any] = {}
        if offload is not None:
            strategy["wrap"] = {"classes": ["LlamaBlock"]}
            strategy["offload"] = dict(offload)
            if "nvme" in offload.values():
                strategy["offload"]["path"] = given.folder
            strategy["offload"] |= shares_of(offload, given)
        if zero is not None:
            strategy["zero"] = zero
        if given.recompute:
            strategy["recompute"] = "full"
        size = size_of(given.size)
        engine = library.prepare(
            lambda: Llama(size),
            optim={"type": optim, **ADAM, "no_decay": []},
            precision={"compute": "bf16", "master": master},
            strategy=strategy,
            clip_norm=1.0,
            device=given.device,
        )
        return lambda x, y: engine.train_step([(x, y)]).loss

    return start


def shares_of(offload: dict[str, Any], given: argparse.Namespace) -> dict[str, float]:
    """The shares of a row, or what the command line says instead."""
    wanted = {key: getattr(given, key) for key in ("ratio", "host_ratio") if key in offload}
    if wanted.get("ratio") is None and offload.get("ratio") == "auto":
        wanted["ratio"] = given.share
    return {key: share for key, share in wanted.items() if share is not None}


def planned_share(given: argparse.Namespace) -> float:
    """What `ratio: auto` takes for this model on this machine; before CUDA is begun, in a copy of the process."""
    from plait.config import parse_sections
    from plait.plan.gate import run_forked
    from plait.plan.hardware import hardware_here
    from plait.plan.shares import with_ratio

    size = size_of(given.size)
    shape = {"dim": size.dim, "layers": size.layers, "heads": size.heads, "kv_heads": size.kv_heads}
    model = {"type": "llama", **shape, "ffn_dim": size.ffn, "vocab_size": size.vocab, "tie_embeddings": size.tied}
    config = parse_sections(
        model={**model, "seq_len": given.seq},
        optim={"type": "AdamW", **ADAM},
        precision="bf16",
        batch={"micro": given.batch},
        train={"clip_norm": 1.0},
        strategy={"offload": {"optimizer": "cpu", "ratio": "auto"}, "recompute": "full" if given.recompute else "none"},
    ).config

    def look() -> float:
        return with_ratio(config, hardware_here(given.device), ranks=1).strategy.offload.share

    found = run_forked(look, seconds=120.0)
    if isinstance(found, str):
        raise SystemExit(f"ratio: auto: {found}")
    return found


# ---- DeepSpeed


def deepspeed(stage: int, *, params: bool = False, ratio: float | None = None) -> Callable[..., Step]:
    """DeepSpeed's ZeRO-Offload, with its own CPU Adam; `ratio` is its word for the share that the CPU updates."""

    def start(given: argparse.Namespace) -> Step:
        common.join_alone()
        if given.device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed
        import torch
        from nets import Llama

        deepspeed.init_distributed(dist_backend="nccl" if given.device == "cuda" else "gloo")
        pinned = {"device": "cpu", "pin_memory": given.device == "cuda"}
        zero: dict[str, Any] = {"stage": stage, "offload_optimizer": pinned, "overlap_comm": True}
        zero["contiguous_gradients"] = True
        if params:
            zero["offload_param"] = pinned
        if ratio is not None:
            zero["offload_optimizer"] = {**pinned, "ratio": ratio if given.ratio is None else 1.0 - given.ratio}
        config = {
            "train_micro_batch_size_per_gpu": given.batch,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "steps_per_print": 10**9,
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": False}},
        }
        size = size_of(given.size)
        if stage == 3:
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = Llama(size)
        else:
            with torch.device(given.device):
                torch.set_default_dtype(torch.bfloat16)
                model = Llama(size)
                torch.set_default_dtype(torch.float32)
        if given.recompute:
            for block in model.blocks:
                block.forward = _recomputed(block.forward)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

        def step(x: Any, y: Any) -> Any:
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return start


def _recomputed(forward: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)


ROWS: dict[str, tuple[str, Callable[..., Step]]] = {
    "plait-resident": ("Plait, nothing offloaded", plait(None)),
    "plait-cpu": ("Plait, `offload: cpu`", plait({"optimizer": "cpu"})),
    "plait-cpu-updates": (
        "Plait, `offload: {optimizer: cpu, update: cpu}`",
        plait({"optimizer": "cpu", "update": "cpu"}),
    ),
    "plait-delayed": (
        "Plait, `offload: {optimizer: cpu, delayed: true}`",
        plait({"optimizer": "cpu", "delayed": True}),
    ),
    "plait-ratio": ("Plait, `offload: {optimizer: cpu, ratio: 0.5}`", plait({"optimizer": "cpu", "ratio": 0.5})),
    "plait-auto": ("Plait, `offload: {optimizer: cpu, ratio: auto}`", plait({"optimizer": "cpu", "ratio": "auto"})),
    "plait-ratio8": (
        "Plait, `offload: {optimizer: cpu, ratio: 0.4}`, 8-bit moments",
        plait({"optimizer": "cpu", "ratio": 0.4}, optim="AdamW8bit"),
    ),
    "plait-ratio8-bf16": (
        "Plait, `offload: {optimizer: cpu, ratio: 0.5}`, 8-bit moments, `master: false`",
        plait({"optimizer": "cpu", "ratio": 0.5}, optim="AdamW8bit", master=False),
    ),
    "plait-mix8": (
        "Plait, `offload: {optimizer: nvme, ratio: 0.3, host_ratio: 0.5}`, 8-bit moments",
        plait({"optimizer": "nvme", "ratio": 0.3, "host_ratio": 0.5}, optim="AdamW8bit"),
    ),
    "plait-nvme": ("Plait, `offload: nvme`", plait({"optimizer": "nvme"})),
    "plait-params": (
        "Plait, `zero: 3, offload: {optimizer: cpu, params: cpu}`",
        plait({"optimizer": "cpu", "params": "cpu"}, zero=3),
    ),
    "ds2": ("DeepSpeed, stage 2, optimizer on the CPU", deepspeed(2)),
    "ds3": ("DeepSpeed, stage 3, optimizer on the CPU", deepspeed(3)),
    "ds3-ratio": ("DeepSpeed, stage 3, `ratio: 0.5` of the optimizer on the CPU", deepspeed(3, ratio=0.5)),
    "ds3-ratio-params": (
        "DeepSpeed, stage 3, `ratio: 0.5` of the optimizer on the CPU, parameters too",
        deepspeed(3, params=True, ratio=0.5),
    ),
    "ds3-params": ("DeepSpeed, stage 3, optimizer and parameters on the CPU", deepspeed(3, params=True)),
}


# ---- measuring


def measure(name: str, given: argparse.Namespace) -> Result:
    """In the child: train, and tell."""
    import torch
    from nets import token_walks

    size, cuda = size_of(given.size), given.device == "cuda"
    stay_within()
    torch.manual_seed(0)
    begin = time.perf_counter()
    given.folder = tempfile.mkdtemp(dir=given.disk)
    step = ROWS[name][1](given)
    ready = time.perf_counter() - begin
    tokens = token_walks(4 * given.batch, given.seq + 1, size.vocab, seed=1).to(given.device).split(given.batch)
    batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens]
    times, loss = [], None
    for index in range(given.warmup + given.steps):
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        print(f"ready after {ready:.0f} s; {index} steps after {times[-1] - begin:.0f} s", flush=True)  # last words
        loss = step(*batches[index % len(batches)])
    if cuda:
        torch.cuda.synchronize()
    times.append(time.perf_counter())
    seconds = median([after - before for before, after in pairwise(times[given.warmup :])])
    found = {
        "seconds": round(seconds, 3),
        "tokens_per_s": round(given.batch * given.seq / seconds),
        "tflops": round(given.batch * given.seq * size.flops_per_token(given.seq) / seconds / 1e12, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else None,
        "host_gib": round(common.memory_mib("VmHWM") / 1024, 1),
        "ready_s": round(ready, 1),
        "ratio": given.share,
        "loss": round(float(loss), 4),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }
    if given.profile and name.startswith("plait"):
        found["overlap"] = overlap(step, batches, Path(given.profile).with_stem(f"{Path(given.profile).stem}-{name}"))
    return found


def label_of(name: str, ratio: float | None) -> str:
    """What a row is called; `ratio` is the share on the GPU that the command line asks for, DeepSpeed's on the CPU."""
    label = ROWS[name][0]
    if ratio is None:
        return label
    return re.sub(r"\bratio: [\w.]+", f"ratio: {1.0 - ratio if name.startswith('ds') else ratio:g}", label, count=1)


def as_table(found: dict[tuple[str, str], Result], ratio: float | None) -> str:
    """One line a row."""
    lines = []
    for (size, name), one in found.items():
        label = label_of(name, ratio)
        if "error" in one:
            lines.append([size, label, *"–" * 5, f"did not run: {one['error']}"])
            continue
        peak = "–" if one["peak_gib"] is None else f"{one['peak_gib']:.1f}"
        numbers = [f"{one['seconds']:.2f}", f"{one['tokens_per_s']:,}", f"{one['tflops']:.0f}", peak]
        lines.append([size, label, *numbers, f"{one['host_gib']:.1f}", f"{one['loss']:.3f}"])
    head = ["model", "row", "s/step", "tokens/s", "TFLOP/s", "GPU GiB", "host GiB", "last loss"]
    return common.table(head, lines)


def pairs_of(given: argparse.Namespace) -> list[tuple[str, str]]:
    """Size and row of everything that is to run: `8b/ds2` is one of them, `ds2` one for each of the sizes."""
    sizes = given.sizes.split(",")
    found = []
    for word in given.rows.split(",") if given.rows else list(ROWS):
        size, _, name = word.rpartition("/")
        common.chosen(name, list(ROWS))
        found += [(size, name)] if size else [(each, name) for each in sizes]
    return sorted(found, key=lambda pair: [size for size, _ in found].index(pair[0]))


def options_of(given: argparse.Namespace, size: str) -> list[str]:
    """The command line of a child."""
    words = ["--size", size]
    for key in ("device", "batch", "seq", "warmup", "steps", "disk", "profile", "ratio", "host_ratio", "share"):
        value = getattr(given, key)
        words += [] if value is None else [f"--{key.replace('_', '-')}", str(value)]
    return [*words, *(["--recompute"] if given.recompute else [])]


def parse() -> argparse.Namespace:
    """The options."""
    options = common.parser(__doc__, list(ROWS))
    options.add_argument("--sizes", default="3b,8b", help=f"of tiny, 1b, 3b, {', '.join(SIZES)}")
    options.add_argument("--size", help=argparse.SUPPRESS)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--batch", type=int, default=4, help="rows of a batch")
    options.add_argument("--seq", type=int, default=2048, help="tokens of a row")
    options.add_argument("--warmup", type=int, default=2, help="steps that are not measured")
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--expect", action="store_true", help="say how long each row should take, and run none")
    options.add_argument("--cores", type=int, help="of the machine that --expect is about; absent: of this one")
    options.add_argument("--ratio", type=float, help="share of the optimizer on the GPU, of the rows that have one")
    options.add_argument("--share", type=float, help=argparse.SUPPRESS)
    options.add_argument("--host-ratio", type=float, help="share in host memory, of the rows that have one")
    options.add_argument("--recompute", action="store_true", help="recompute every block in the backward pass")
    options.add_argument("--profile", help="write traces beside this path, and say how much overlaps")
    options.add_argument("--disk", default=tempfile.gettempdir(), help="folder for files of the nvme tier")
    options.add_argument("--limit", type=float, default=400.0, help="seconds that one row may take")
    options.add_argument("--total", type=float, default=3600.0, help="seconds that all of it may take")
    return options.parse_args()


def main() -> None:
    begin = time.monotonic()
    given = parse()
    if given.child is not None:
        common.reply(lambda: measure(given.child, given))
    from offload_expect import BUILD_S, expected

    pairs = pairs_of(given)
    plans = {pair: expected(pair[1], given, size_of(pair[0])) for pair in pairs}
    for (size, name), plan in plans.items():
        common.show(size=size, row=name, expected=plan)
    builds = any(name.startswith("ds") for _, name in pairs)
    common.show(expected_total_s=sum(plan["total_s"] for plan in plans.values()) + (BUILD_S if builds else 0))
    if given.expect:
        return
    where = common.machine()
    found: dict[tuple[str, str], Result] = {}
    adam = CpuAdam() if builds else None
    shares: dict[str, float] = {}
    for size in dict(pairs) if given.ratio is None else []:
        if (size, "plait-auto") in pairs:
            given.size = size
            shares[size] = planned_share(given)
            common.show(size=size, ratio=shares[size], after_s=round(time.monotonic() - begin, 1))
    if adam is not None:
        common.show(row="DeepSpeed's CPU Adam", **adam.wait(min(given.limit, given.total / 3)))
    for size, name in pairs:
        left = given.total - (time.monotonic() - begin)
        given.share = shares.get(size) if name == "plait-auto" else None
        if left < plans[size, name]["ready_s"]:
            found[size, name] = {"error": f"not begun: {left:.0f} s were left"}
        else:
            command = common.itself(__file__, "--child", name, *options_of(given, size))
            said = common.run_child(command, limit=min(given.limit, left))
            found[size, name] = said if "error" in said else said["ranks"][0]
        common.show(size=size, row=name, after_s=round(time.monotonic() - begin, 1), **found[size, name])
        if given.json is not None:
            Path(given.json).write_text(json.dumps(as_json(where, found), indent=1) + "\n")
    device = next((one["device"] for one in found.values() if "device" in one), given.device)
    title = f"{device}; {common.say_machine(where)}; {given.batch} × {given.seq} tokens a step, {given.steps} steps"
    common.finish(given.json, as_json(where, found), f"{title}.\n\n{as_table(found, given.ratio)}")


def as_json(where: Any, found: dict[tuple[str, str], Result]) -> Result:
    """All that is known so far."""
    return {"machine": where, "results": {f"{size}/{name}": one for (size, name), one in found.items()}}


if __name__ == "__main__":
    main()
