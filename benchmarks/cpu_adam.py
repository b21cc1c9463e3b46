"""AdamW on the host: Plait's step beside torch's fused AdamW and DeepSpeed's DeepSpeedCPUAdam.

    python benchmarks/cpu_adam.py                        # 50M parameters, all cores
    python benchmarks/cpu_adam.py --params 2e8 --threads 8

`fp32`: fp32 gradients, fp32 weights. `clipped`: the gradients count times a factor that is known only now, as clipping
and loss scaling give it. `bf16`: gradients come in bf16 and the model wants bf16 weights, as offloading has it; there
the peers need passes of their own before and after the step. All update the same number of parameters in one process,
in turn, round after round. DeepSpeed builds its operator with the local compiler at the first use; where that is not
there, its column is empty and says why.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import common
from common import Result, median

CASES = ("fp32", "clipped", "bf16")
FACTOR = 0.37


def measure(given: argparse.Namespace) -> Result:
    """Seconds of each round, by case and by who."""
    import torch

    torch.set_num_threads(given.threads)
    numel = int(given.params)
    makers = {"torch fused": _torch, "DeepSpeedCPUAdam": _deepspeed, "Plait": _plait}
    found: Result = {"seconds": {case: {} for case in CASES}, "missing": {}}
    for case in CASES:
        steps: dict[str, Callable[[], object]] = {}
        for name, make in makers.items():
            try:
                steps[name] = make(case, numel)
                steps[name]()  # states are made, operators built
                steps[name]()
            except Exception as error:
                steps.pop(name, None)
                found["missing"][name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for turn in range(given.rounds):
            order = list(steps) if turn % 2 else list(reversed(steps))
            for name in order:
                start, used = time.perf_counter(), time.process_time()
                steps[name]()
                times[name].append((time.perf_counter() - start, time.process_time() - used))
        found["seconds"][case] = times
    return found


def _tensors(case: str, numel: int) -> tuple[Any, Any, Any]:
    """A weight, its gradient, and the place for the rounded weight."""
    import torch

    weight, grad = torch.randn(numel), torch.randn(numel)
    if case == "bf16":
        return weight, grad.bfloat16(), torch.empty(numel, dtype=torch.bfloat16)
    return weight, grad, None


def _plait(case: str, numel: int) -> Callable[[], None]:
    import torch

    from plait.kernels.adam import AdamNumbers, ThreadPool, adam_step

    pool = ThreadPool(torch.get_num_threads())
    weight, grad, place = _tensors(case, numel)
    mean, square = torch.zeros(numel), torch.zeros(numel)
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        numbers = AdamNumbers(count, lr=1e-3, weight_decay=0.01, scale=FACTOR if case == "clipped" else 1.0)
        adam_step(numbers, [weight], [grad], [mean], [square], [place], pool=pool)

    return step


def _torch(case: str, numel: int) -> Callable[[], object]:
    import torch

    weight, grad, place = _tensors(case, numel)
    param = torch.nn.Parameter(weight)
    optimizer = torch.optim.AdamW([param], lr=1e-3, weight_decay=0.01, fused=True)
    return _around(case, param, grad, place, optimizer)


def _deepspeed(case: str, numel: int) -> Callable[[], object]:
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weight, grad, place = _tensors(case, numel)
    param = torch.nn.Parameter(weight)
    return _around(case, param, grad, place, DeepSpeedCPUAdam([param], lr=1e-3, weight_decay=0.01))


def _around(case: str, param: Any, grad: Any, place: Any, optimizer: Any) -> Callable[[], object]:
    """A step with what an optimizer of fp32 tensors needs before and after it."""
    import torch

    param.grad = torch.empty_like(param)
    param.grad.copy_(grad)

    def step() -> None:
        with torch.no_grad():
            if case == "bf16":
                param.grad.copy_(grad)
            elif case == "clipped":
                torch.mul(grad, FACTOR, out=param.grad)
            optimizer.step()
            if place is not None:
                place.copy_(param)

    return step


def _cell(times: list[tuple[float, float]]) -> str:
    wall, cpu = ([1e3 * value for value in values] for values in zip(*times, strict=True))
    return f"{median(wall):.1f} ({min(wall):.1f}; {median(cpu):.1f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=5e7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        common.reply(lambda: measure(given))
    print(common.say_machine(common.machine()))
    print(f"{given.params / 1e6:g}M parameters, {given.threads} threads, {given.rounds} rounds\n")
    options = ["--child", "--params", str(given.params), "--threads", str(given.threads), "--rounds", str(given.rounds)]
    answer = common.run_child(common.itself(__file__, *options), limit=1800, env={"DS_ACCELERATOR": "cpu"})
    if "error" in answer:
        raise SystemExit(answer["error"])
    found = answer["ranks"][0]
    names = ("torch fused", "DeepSpeedCPUAdam", "Plait")
    print("| ms: median (best; CPU time) | " + " | ".join(names) + " |")
    print("|---" * (1 + len(names)) + "|")
    for case, times in found["seconds"].items():
        cells = [_cell(times[name]) if name in times else "—" for name in names]
        print(f"| {case} | " + " | ".join(cells) + " |")
    for name, why in found["missing"].items():
        print(f"\n{name}: {why}")


if __name__ == "__main__":
    main()
