"""How well the plan knows: predicted peak memory and step time beside measured ones, run by run.

    python benchmarks/plan.py measure --out measured.json        # on a GPU: each run in a process of its own
    python benchmarks/plan.py predict --gpu h200 --out predicted.json   # anywhere: needs no GPU
    python benchmarks/plan.py compare measured.json predicted.json --plot plan.svg

Measured is the device's own account: the most that was allocated, the most that was reserved, and the median of
five steps after three. The estimates of DeepSpeed (model states, `estimate_zero2_model_states_mem_needs`) and of
Accelerate (`estimate-memory`: four times the model in fp32 with Adam) stand beside them, by their formulas.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path
from statistics import median
from typing import Any

GIB = 2**30


def llama(
    dim: int, layers: int, heads: int, kv: int, ffn: int, vocab: int = 32000, tied: bool = False
) -> dict[str, Any]:
    """A Llama's section."""
    sizes = {"vocab_size": vocab, "dim": dim, "layers": layers, "heads": heads, "kv_heads": kv, "ffn_dim": ffn}
    return {"type": "llama", **sizes, "tie_embeddings": tied}


def gpt(dim: int, layers: int, heads: int) -> dict[str, Any]:
    """A GPT's section."""
    return {"type": "gpt", "vocab_size": 50304, "dim": dim, "layers": layers, "heads": heads}


MODELS = {
    "gpt-125m": gpt(768, 12, 12),
    "gpt-350m": gpt(1024, 24, 16),
    "llama-160m": llama(768, 12, 12, 12, 2048),
    "llama-1b": llama(2048, 16, 32, 8, 8192, 128256, tied=True),
    "llama-3b": llama(3072, 28, 24, 8, 8192, 128256, tied=True),
    "llama-8b": llama(4096, 32, 32, 8, 14336, 128256),
}
COMPILED, FULL, SELECTIVE = {"compile": True}, {"recompute": "full"}, {"recompute": "selective"}
HALF_ONLY = {"compute": "bf16", "master": False}
RUNS: list[tuple[str, int, int, int, Any, dict[str, Any], str]] = [
    # model, micro-batch, tokens, accumulation, precision, strategy, optimizer
    ("gpt-125m", 16, 1024, 1, "bf16", {}, "AdamW"),
    ("gpt-125m", 8, 1024, 1, "fp32", {}, "AdamW"),
    ("gpt-125m", 16, 1024, 1, "bf16", COMPILED, "AdamW"),
    ("gpt-350m", 8, 1024, 4, "bf16", {}, "AdamW"),
    ("gpt-350m", 16, 1024, 1, "fp16", SELECTIVE, "AdamW"),
    ("llama-160m", 8, 2048, 1, "bf16", {}, "Lion"),
    ("llama-160m", 4, 2048, 2, "fp32", {}, "SGD"),
    ("llama-1b", 4, 4096, 1, "bf16", {}, "AdamW"),
    ("llama-1b", 4, 4096, 1, "bf16", COMPILED, "AdamW"),
    ("llama-1b", 4, 4096, 1, "bf16", {"compile": {"scope": "block"}}, "AdamW"),
    ("llama-1b", 4, 4096, 1, "bf16", FULL, "AdamW"),
    ("llama-1b", 8, 4096, 1, "bf16", {**FULL, **COMPILED}, "AdamW"),
    ("llama-1b", 4, 4096, 1, "bf16", SELECTIVE, "AdamW"),
    ("llama-1b", 4, 4096, 1, "bf16", {"recompute": {"mode": "every", "every": 2}}, "AdamW"),
    ("llama-1b", 1, 16384, 1, "bf16", FULL, "AdamW"),
    ("llama-1b", 1, 32768, 1, "bf16", {**FULL, **COMPILED}, "AdamW"),
    ("llama-1b", 1, 2048, 1, "fp32", {}, "AdamW"),
    ("llama-1b", 2, 2048, 1, "tf32", {}, "AdamW"),
    ("llama-1b", 1, 4096, 8, "bf16", {}, "AdamW"),
    ("llama-3b", 2, 4096, 1, "bf16", FULL, "AdamW"),
    ("llama-3b", 2, 4096, 1, "bf16", COMPILED, "AdamW"),
    ("llama-3b", 2, 4096, 1, "bf16", SELECTIVE, "Lion"),
    ("llama-8b", 1, 4096, 1, HALF_ONLY, FULL, "AdamW"),
    ("llama-8b", 2, 4096, 1, "bf16", {**FULL, **COMPILED}, "SGD"),
]


def name_of(run: tuple[Any, ...]) -> str:
    """A run in a few words."""
    model, micro, tokens, accumulation, precision, strategy, optimizer = run
    words = [model, f"{micro}×{tokens}" + (f"×{accumulation}" if accumulation > 1 else "")]
    words.append("bf16 weights" if isinstance(precision, dict) else precision)
    for key, value in strategy.items():
        mode = (
            value if isinstance(value, str) else " ".join(map(str, value.values())) if isinstance(value, dict) else ""
        )
        words.append(f"{key} {mode}".strip())
    return ", ".join([*words, optimizer])


def config_of(run: tuple[Any, ...]) -> Any:
    """Its run description."""
    from plait.config import parse_sections

    model, micro, tokens, accumulation, precision, strategy, optimizer = run
    return parse_sections(
        model={**MODELS[model], "seq_len": tokens},
        batch={"micro": micro, "accumulation": accumulation},
        precision=precision,
        strategy=strategy or "single",
        optim={"type": optimizer, "lr": 1e-4},
        train={"clip_norm": 1.0},
    ).config


def measure_one(run: tuple[Any, ...]) -> dict[str, Any]:
    """Train some steps; to be called in a process of its own."""
    import torch

    from plait.config import resolve_batch
    from plait.distributed import open_world
    from plait.engine import Preparation, prepare_native

    config = config_of(run)
    batch = resolve_batch(config.batch, 1)
    with open_world(config) as world:
        engine = prepare_native(Preparation(config, world, accumulation=batch.accumulation))
        shape, seconds = (batch.micro, config.model.seq_len), []
        for _ in range(8):
            rows = [torch.randint(0, config.model.vocab_size, shape) for _ in range(batch.accumulation)]
            torch.cuda.synchronize()
            start = time.perf_counter()
            engine.train_step([{"input_ids": each, "labels": each} for each in rows])
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.max_memory_allocated() / GIB,
            "reserved": torch.cuda.max_memory_reserved() / GIB,
            "on_device": (total - free) / GIB,
            "seconds": median(seconds[3:]),
            "parameters": engine.parameter_count()[0],
        }


def measure(out: Path, only: list[int]) -> None:
    """Every run in a forked child: torch is imported once, and a run that fails takes nothing with it."""
    import torch  # noqa: F401

    import plait.engine  # noqa: F401

    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for index, run in enumerate(RUNS):
        if only and index not in only:
            continue
        part = out.with_suffix(f".{index}")
        child = os.fork()
        if child == 0:
            try:
                part.write_text(json.dumps(measure_one(run)))
            except BaseException:
                text = traceback.format_exc(limit=-3)
                part.write_text(json.dumps({"error": text}))
            os._exit(0)
        os.waitpid(child, 0)
        found[name_of(run)] = json.loads(part.read_text()) if part.exists() else {"error": "no answer"}
        part.unlink(missing_ok=True)
        print(f"{index:2d} {name_of(run)}: {found[name_of(run)]}", flush=True)
        out.write_text(json.dumps(found, indent=1))


def predict(gpu: str, out: Path, only: list[int]) -> None:
    """The plan of every run."""
    from plait.plan.hardware import find_hardware
    from plait.plan.plan import make_plan

    machine, found = find_hardware(gpu), {}
    for index, run in enumerate(RUNS):
        if only and index not in only:
            continue
        start = time.perf_counter()
        config = config_of(run)
        plan = make_plan(config, machine, ranks=1, detailed=False)
        account = plan.ranks[0].ledger
        found[name_of(run)] = {
            "allocated": account.peak[1] / GIB,
            "reserved": account.numbers["reserved"] / GIB,
            "needed": plan.needed_gib,
            "seconds": plan.seconds,
            "took": time.perf_counter() - start,
            "deepspeed": states_gib(config),
            "accelerate": 4 * 4 * parameters(config) / GIB,
        }
        print(f"{index:2d} {name_of(run)}: {found[name_of(run)]}", flush=True)
        out.write_text(json.dumps(found, indent=1))


def parameters(config: Any) -> int:
    """Numbers in the described model."""
    import torch

    from plait.models import build_model

    with torch.device("meta"):
        return sum(param.numel() for param in build_model(config.model).parameters())


def states_gib(config: Any) -> float:
    """DeepSpeed's estimate for one GPU without offload: 20 bytes a parameter at stage 2."""
    from plait.plan.states import estimate_zero2_model_states_mem_needs

    _, gpu = estimate_zero2_model_states_mem_needs(parameters(config), cpu_offload=False)
    return float(gpu) / GIB


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "predict", "compare"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=Path("plan.json"))
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="numbers of runs")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.out, given.only)
    elif given.command == "predict":
        predict(given.gpu, given.out, given.only)
    else:
        sys.path.insert(0, str(Path(__file__).parent))
        from plan_compare import compare

        compare(*given.files, plot=given.plot)


if __name__ == "__main__":
    main()
