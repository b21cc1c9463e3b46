"""What a checkpoint costs: saving, loading and converting, Plait beside torch's DCP and DeepSpeed's zero_to_fp32.

    python benchmarks/checkpoint.py                                  # 100M parameters with AdamW, 2 gloo ranks
    python benchmarks/checkpoint.py --rows convert                   # needs deepspeed
    python benchmarks/checkpoint.py --device cuda --params 8e9 --weights-only --rows disk   # one GPU

`disk`: the same tensors, sharded over the ranks as ZeRO-3 does it, are saved and loaded by Plait and by DCP in turn,
round after round in one run, so that what the disk does hits all alike. Both force their files to the disk. Loading
finds the files in the page cache. `blocked` is how long training has to wait.

`convert`: real DeepSpeed trains one step and saves; its `zero_to_fp32.py` and `plait convert` each make a torch
file of the fp32 weights, in a process of their own, in turn: its whole time, and the most memory it held.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from common import Result, median

ROWS = ("disk", "convert")


# ---- saving and loading


def make_tensors(given: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """A world, and the state of a model of about so many parameters, as ZeRO-3 keeps it."""
    import torch

    from plait.config import parse_sections
    from plait.distributed import open_world

    torch.set_num_threads(1)
    config = parse_sections(device=given.device, strategy="zero3" if given.ranks > 1 else {}).config
    world = open_world(config)
    layers = 12
    width = int((given.params / (12 * layers)) ** 0.5) // 64 * 64
    shapes = {"embedding.weight": (32 * 1024 if given.params < 1e9 else 128 * 1024, width)}
    for layer in range(layers):
        for part, rows, columns in (("qkv", 3, 1), ("out", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            shapes[f"blocks.{layer}.{part}.weight"] = (rows * width, columns * width)
        shapes[f"blocks.{layer}.norm.weight"] = (width,)
    dtype = torch.bfloat16 if given.weights_only else torch.float32
    generator = torch.Generator(world.device).manual_seed(world.rank)

    def make(shape: tuple[int, ...]) -> Any:
        if world.mesh is None:
            return torch.rand(shape, dtype=dtype, device=world.device, generator=generator)
        from torch.distributed.tensor import DTensor, Shard

        mine = len(torch.empty(shape[0], device="meta").chunk(world.size)[world.rank])
        local = torch.rand((mine, *shape[1:]), dtype=dtype, device=world.device, generator=generator)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, world.mesh["dp_shard"], [Shard(0)], shape=torch.Size(shape), stride=stride)

    keys = ("model.{}",) if given.weights_only else ("model.{}", "optim.{}.exp_avg", "optim.{}.exp_avg_sq")
    tensors = {key.format(name): make(shape) for name, shape in shapes.items() for key in keys}
    if not given.weights_only:
        tensors |= {f"optim.{name}.step": torch.tensor(1.0) for name in shapes}
    return world, tensors


def measure_disk(given: argparse.Namespace) -> Result:
    """In a rank: all ways in turn, round after round."""
    import torch
    import torch.distributed.checkpoint as dcp

    from plait.checkpoint import CheckpointWriter, load_into, open_checkpoint

    world, tensors = make_tensors(given)
    root = Path(given.folder)
    alone = world.size == 1
    writers = {way: CheckpointWriter(root, world, background=way == "background") for way in ("waiting", "background")}
    found: dict[str, list[float]] = {}

    def clock(name: str, action: Callable[[], Any]) -> Any:
        world.barrier()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = action()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        found.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def remove(folder: Path) -> None:
        world.barrier()
        if world.is_main:
            shutil.rmtree(folder)
        world.barrier()

    def one_round() -> int:
        theirs, ours = root / "dcp", root / "step-00000001"
        writer = dcp.FileSystemWriter(theirs)
        clock("DCP save", lambda: dcp.save(dict(tensors), storage_writer=writer, no_dist=alone))
        reader = dcp.FileSystemReader(theirs)
        clock("DCP load", lambda: dcp.load(dict(tensors), storage_reader=reader, no_dist=alone))
        remove(theirs)
        clock("Plait save", lambda: writers["waiting"].save(ours, tensors, {}, step=1))
        clock("Plait load", lambda: load_into(open_checkpoint(ours), tensors, world=world))
        size = sum(path.stat().st_size for path in ours.iterdir())
        remove(ours)
        start = time.perf_counter()
        clock("Plait async blocked", lambda: writers["background"].save(ours, tensors, {}, step=1))
        writers["background"].wait()
        found.setdefault("Plait async whole", []).append(time.perf_counter() - start)
        remove(ours)
        if given.dcp_async:
            writer = dcp.FileSystemWriter(theirs)
            future = clock("DCP async blocked", lambda: dcp.async_save(dict(tensors), storage_writer=writer))
            future.result()
            remove(theirs)
        return size

    for _ in range(given.rounds + 1):
        size = one_round()
    # The first round takes memory that later ones use again.
    return {"size": size, "times": {name: times[1:] for name, times in found.items()}, "first": found}


def report_disk(given: argparse.Namespace) -> Result:
    """Run the ranks, and put the medians beside each other."""
    with tempfile.TemporaryDirectory(prefix="plait-bench-disk-", dir=given.place) as folder:
        arguments = [*sys.argv[1:], "--child", "disk", "--folder", folder]
        outcome = common.run_child(common.itself(__file__, *arguments), limit=3600, ranks=given.ranks)
    if "error" in outcome:
        raise SystemExit(f"disk: {outcome['error']}")
    ranks = outcome["ranks"]
    gib = ranks[0]["size"] / 2**30
    seconds = {
        # Everybody waits for the slowest.
        name: median([max(rank["times"][name][number] for rank in ranks) for number in range(given.rounds)])
        for name in ranks[0]["times"]
    }
    first = {name: max(rank["first"][name][0] for rank in ranks) for name in seconds}
    rows = []
    for name, value in seconds.items():
        base = seconds["DCP load" if name.endswith("load") else "DCP save"]
        rows.append([name, f"{value:.3f}", f"{gib / value:.2f}", f"{value / base:.2f}", f"{first[name]:.3f}"])
    head = ["", "seconds", "GiB/s", "÷ DCP save or load", "first time"]
    return {"gib": gib, "seconds": seconds, "first": first, "table": common.table(head, rows)}


# ---- converting

_TRAIN = """
import os, sys, torch, deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
sys.path.insert(0, {here!r})
from nets import Gpt, GptSize, token_walks
torch.set_num_threads(1)
torch.manual_seed(0)
config = {{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0,
          "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3, "torch_adam": True}}}},
          "zero_optimization": {{"stage": {stage}}}}}
size = GptSize({layers}, {dim}, 12, 32000, 64)
engine, *_ = deepspeed.initialize(model=Gpt(size), config=config)
tokens = token_walks(1, 65, 32000, seed=1)
loss = engine(tokens[:, :-1], tokens[:, 1:])
engine.backward(loss)
engine.step()
engine.save_checkpoint({folder!r})
"""


def report_convert(given: argparse.Namespace) -> Result:
    """Have DeepSpeed save, and convert it both ways."""
    if common.version("deepspeed") == "not installed":
        raise SystemExit("convert: deepspeed is not installed")
    tables = []
    numbers: Result = {}
    for stage in (2, 3):
        with tempfile.TemporaryDirectory(prefix="plait-bench-convert-", dir=given.place) as name:
            folder = Path(name)
            script = folder / "train.py"
            here = str(Path(__file__).resolve().parent)
            text = _TRAIN.format(stage=stage, folder=str(folder / "ds"), here=here, layers=12, dim=768)
            script.write_text(text)
            torchrun = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                str(script),
            ]
            env = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
            subprocess.run(torchrun, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            theirs = [
                sys.executable,
                str(folder / "ds" / "zero_to_fp32.py"),
                str(folder / "ds"),
                "{out}",
            ]
            ours = [sys.executable, "-m", "plait", "convert", str(folder / "ds"), "{out}", "--to", "torch"]
            ways = {"zero_to_fp32": theirs, "plait convert": ours}
            found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for number in range(given.rounds):
                for way, command in ways.items():
                    out = str(folder / f"{way.replace(' ', '-')}-{number}")
                    found[way].append(_timed([part.format(out=out) for part in command], env))
            rows = []
            for way, pairs in found.items():
                seconds, peak = median([s for s, _ in pairs]), median([p for _, p in pairs])
                numbers[f"stage {stage} {way}"] = {"seconds": seconds, "peak_mib": peak}
                rows.append([f"ZeRO-{stage}", way, f"{seconds:.2f}", f"{peak:,.0f}"])
            tables.extend(rows)
    return {"convert": numbers, "table": common.table(["checkpoint", "", "seconds", "peak MiB"], tables)}


def _timed(command: list[str], env: dict[str, str]) -> tuple[float, float]:
    """Seconds and the most memory of a process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    words = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{words.decode(errors='replace')[-2000:]}")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def main() -> None:
    """Parse, measure, print."""
    parser = common.parser(__doc__, ROWS)
    parser.add_argument("--params", type=float, default=1e8)
    parser.add_argument("--ranks", type=int, help="absent: 2 on CPU, 1 on CUDA")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--weights-only", action="store_true", help="bf16 weights without the optimizer's state")
    parser.add_argument("--dcp-async", action="store_true", help="measure torch's async_save too")
    parser.add_argument("--place", help="the folder to write in; absent: the system's temporary one")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.ranks = given.ranks or (1 if given.device == "cuda" else 2)
    if given.child == "disk":
        common.reply(lambda: measure_disk(given))
    where = common.machine()
    found: Result = {"machine": where}
    texts = [common.say_machine(where)]
    for row, report in (("disk", report_disk), ("convert", report_convert)):
        if row in common.chosen(given.rows, ROWS):
            found[row] = report(given)
            if row == "disk":
                texts.append(
                    f"{found[row]['gib']:.2f} GiB, {given.ranks} ranks, {given.device}, median of {given.rounds}"
                )
            texts.append(found[row].pop("table"))
    common.finish(given.json, found, "\n\n".join(texts))


if __name__ == "__main__":
    main()
