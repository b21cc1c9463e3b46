"""What makes an offloaded run on a device differ from a resident one: rounding, or something out of order?

    python tests/gpu/offload_noise.py                  # on a GPU, under a minute
    python tests/gpu/offload_noise.py --device cpu --small

Three questions, each with an answer of its own. Did every gradient arrive at the update, and every new weight at the
unit that reads it? (`Watch`: copies are taken on the device, in its own order, and compared with a second account of
the update. Nothing is recomputed, so what is late or overwritten shows at its full size, and rounding does not grow.)
How far do two resident runs lie apart, the same and off by one rounding? (the yardstick.) And does an offloaded run
that waits for the device after every hand-over still differ? (Then nothing is out of order: it is rounding.)
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.config import parse_sections
from plait.config.run import RunConfig
from plait.distributed import open_world, to_local
from plait.engine import Preparation, prepare_native
from plait.engine.native import NativeEngine
from plait.engine.offload import OffloadedParams
from plait.kernels.adam import AdamNumbers, adam_step_plain
from plait.prove.compare import NOISE, rounding_of

VOCABULARY = 4096
MODEL = {"type": "llama", "dim": 1024, "layers": 8, "heads": 8, "kv_heads": 4, "seq_len": 256}
MIDDLE = {"type": "llama", "dim": 512, "layers": 6, "heads": 8, "kv_heads": 4, "seq_len": 128}
SMALL = {"type": "llama", "dim": 64, "layers": 3, "heads": 4, "kv_heads": 2, "seq_len": 32}
Change = Callable[[NativeEngine], None]


class Run(NamedTuple):
    """What came of a run."""

    losses: list[float]
    """Of each step, and of an evaluation after the last."""
    state: dict[str, Tensor]
    peak_gib: float


def described(
    strategy: dict[str, Any],
    precision: Any,
    *,
    device: str,
    shape: dict[str, Any] = MODEL,
    optim: dict[str, Any] | None = None,
) -> RunConfig:
    """A small Llama that every comparison trains."""
    model = {**shape, "vocab_size": VOCABULARY}
    sections = {"model": model, "precision": precision, "strategy": strategy, "device": device}
    return parse_sections(
        seed=1, train={"clip_norm": 0.5}, optim={"type": "AdamW", "lr": 1e-3, **(optim or {})}, **sections
    ).config


def train(config: RunConfig, *, steps: int = 8, change: Change | None = None) -> Run:
    """A run from the same weights, on the same batches; `change` may do something to the engine first."""
    cuda = config.device == "cuda"
    with open_world(config) as world:
        engine = prepare_native(Preparation(config, world, log=lambda _: None))
        if change is not None:
            change(engine)
        generator = torch.Generator().manual_seed(5)
        losses, length = [], config.model.seq_len  # type: ignore[union-attr]
        for step in range(steps):
            if step == 1 and cuda:
                gc.collect()  # what runs before this one have left
                torch.cuda.reset_peak_memory_stats()
            ids = torch.randint(0, VOCABULARY, (2, 2, length + 1), generator=generator)
            batches = [{"input_ids": each[:, :-1], "labels": each[:, 1:]} for each in ids]
            losses.append(float(engine.train_step(batches[: 1 + step % 2]).loss))
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        found = engine.evaluate_micro_batch(batches[0])
        losses.append(found.loss_sum / found.loss_count)
        with torch.no_grad():
            state = {name: to_local(tensor).cpu().clone() for name, tensor in engine.state_tensors().items()}
        return Run(losses, state, peak)


def nudged(config: RunConfig) -> Change:
    """Every weight off by up to one rounding of the format that is computed in."""
    epsilon = rounding_of(config.precision, on_cpu=config.device == "cpu").epsilon

    def nudge(engine: NativeEngine) -> None:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in engine.weights().values():
                noise = torch.rand(weight.shape, generator=generator).mul_(2).sub_(1).mul_(epsilon)
                weight.mul_(1 + noise.to(weight.device))
        engine.weights_changed()

    return nudge


def in_turn(engine: NativeEngine) -> None:
    """Nothing beside anything else: the device is waited for at every hand-over, and an update ends before the next."""
    store = _store(engine)
    take, begin = store.gradient_queue.take, store.begin

    def take_alone(index: int, grad: Tensor) -> None:
        _wait()
        take(index, grad)
        _wait()

    def begin_alone(factor: float, clip_value: float | None) -> None:
        begin(factor, clip_value)
        store.settle()
        _wait()

    store.gradient_queue.take, store.begin = take_alone, begin_alone  # type: ignore[method-assign]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _store(engine: NativeEngine) -> Any:
    assert isinstance(engine.master_weights, OffloadedParams)
    return engine.master_weights.store


# ---- does everything arrive?


class Watch:
    """Follows an offloaded AdamW run without making it wait for anything."""

    def __init__(self, engine: NativeEngine) -> None:
        store = _store(engine)
        self._device = store.streams.device
        self._optimizer: Any = engine.updater.optimizer
        self._masters = store.masters
        with torch.no_grad():
            self._before = [store.weight(index).to(self._device, copy=True) for index in range(len(store.masters))]
        self._pending: dict[int, Tensor] = {}
        self._steps: list[tuple[dict[int, Tensor], float, list[AdamNumbers]]] = []
        self._reads: list[tuple[int, int, Tensor]] = []
        """How many updates there were, whose weights, and what the unit was to compute with."""
        take, begin = store.gradient_queue.take, store.begin

        def taken(index: int, grad: Tensor) -> None:
            self._pending[index] = grad.detach().clone()
            take(index, grad)

        def begun(factor: float, clip_value: float | None) -> None:
            numbers = [self._numbers(master, factor) for master in self._masters]
            self._steps.append((self._pending, factor, numbers))
            self._pending = {}
            begin(factor, clip_value)

        store.gradient_queue.take, store.begin = taken, begun
        index_of = {id(param): index for index, param in enumerate(engine.master_weights.params)}
        for module in engine.model.modules():
            mine = [index_of[id(param)] for param in module.parameters(recurse=False) if id(param) in index_of]
            if mine:
                module.register_forward_pre_hook(self._reader(module, mine, engine.master_weights.params))

    def _reader(self, module: nn.Module, mine: list[int], params: Any) -> Any:
        def read(_module: nn.Module, _inputs: object) -> None:
            with torch.no_grad():
                self._reads += [(len(self._steps), index, params[index].detach().clone()) for index in mine]

        return read

    def _numbers(self, master: Tensor, factor: float) -> AdamNumbers:
        group = next(group for group in self._optimizer.param_groups if any(each is master for each in group["params"]))
        return AdamNumbers(
            len(self._steps) + 1,
            float(group["lr"]),
            tuple(group["betas"]),
            float(group["eps"]),
            float(group["weight_decay"]),
            scale=factor,
        )

    def worst(self) -> tuple[float, str]:
        """The largest difference between a weight that was read and the second account, in steps of the rate."""
        weights = [weight.float() for weight in self._before]
        moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
        found = (0.0, "nothing was read")
        for count in range(len(self._steps) + 1):
            for _, index, seen in (each for each in self._reads if each[0] == count):
                expected = weights[index]
                rounding = expected.abs() * (2.0**-8 if seen.dtype == torch.bfloat16 else 2.0**-22)
                rounding = expected.abs() * 2.0**-11 if seen.dtype == torch.float16 else rounding
                off = ((seen.float() - expected).abs() - rounding).clamp_(min=0).max()
                lr = self._steps[max(count - 1, 0)][2][index].lr
                found = max(found, (float(off) / lr, f"parameter {index} after {count} updates"))
            if count < len(self._steps):
                grads, _, numbers = self._steps[count]
                for index, weight in enumerate(weights):
                    adam_step_plain(numbers[index], [weight], [grads[index]], [moments[index][0]], [moments[index][1]])
        return found


def arrival(config: RunConfig) -> tuple[float, str]:
    """How far weights are off when a unit reads them, in steps of the learning rate; and which are."""
    found: list[Watch] = []
    train(config, steps=5, change=lambda engine: found.append(Watch(engine)))
    return found[0].worst()


# ---- how far apart are two runs?


def apart(one: Run, other: Run) -> tuple[float, float, str]:
    """The largest relative difference of a loss, and of a tensor's values, and whose that is."""
    loss = max(abs(a - b) / abs(a) for a, b in zip(one.losses, other.losses, strict=True))
    worst, whose = 0.0, ""
    for name, tensor in one.state.items():
        size = float(tensor.float().norm()) or 1.0
        off = float((other.state[name].float() - tensor.float()).norm()) / size
        if off > worst:
            worst, whose = off, name
    return loss, worst, whose


class Yardstick:
    """What one rounding of the weights does to a resident run; see [Note: where a tolerance comes from]."""

    def __init__(self, precision: Any, *, device: str, shape: dict[str, Any] = MODEL, steps: int = 8) -> None:
        config = described({}, precision, device=device, shape=shape)
        self.resident = train(config, steps=steps)
        self.rounding = rounding_of(config.precision, on_cpu=device == "cpu")
        others = [train(config, steps=steps), train(config, steps=steps, change=nudged(config))]
        self.losses = [
            max(_off(a, b) for a, b in zip(self.resident.losses, other.losses, strict=True)) for other in others
        ]
        self.tensors = {
            name: max(_distance(tensor, other.state[name]) for other in others)
            for name, tensor in self.resident.state.items()
        }

    def problems(self, run: Run) -> list[str]:
        """What lies further from the resident run than rounding explains."""
        found = []
        allowed = self.rounding.allowed(max(self.losses))
        for step, (a, b) in enumerate(zip(self.resident.losses, run.losses, strict=True)):
            if _off(a, b) > allowed:
                found.append(f"loss {step}: {a:.6f} and {b:.6f}, off by {_off(a, b):.1e}, allowed {allowed:.1e}")
        for name, tensor in self.resident.state.items():
            # A tensor that rounding alone changes by half says nothing.
            allowed = min(self.rounding.allowed(self.tensors[name]), 2 * NOISE)
            off = _distance(tensor, run.state[name])
            if off > allowed:
                found.append(f"{name}: off by {off:.1e}, allowed {allowed:.1e}")
        return found


def _off(a: float, b: float) -> float:
    return abs(a - b) / abs(a)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm()) / (float(a.float().norm()) or 1.0)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--small", action="store_true", help="a model for a CPU")
    options.add_argument("--precision", default="fp32")
    given = options.parse_args()
    shape: dict[str, Any] = {"device": given.device, "shape": SMALL if given.small else MODEL}
    cpu = {"offload": {"optimizer": "cpu", "bucket_mb": 16.0}}
    half = {"offload": {**cpu["offload"], "ratio": 0.5}}

    def show(name: str, text: str) -> None:
        sys.stdout.write(f"{name:<52}{text}\n")
        sys.stdout.flush()

    for name, strategy in (("cpu", cpu), ("ratio 0.5", half)):
        off, whose = arrival(described(strategy, given.precision, **shape))
        show(f"weights as units read them, {name}", f"off by {off:.2e} of a step ({whose})")
    plain = described({}, given.precision, **shape)
    resident = train(plain)
    runs: dict[str, tuple[Run, Callable[[], Run]]] = {
        "resident again": (resident, lambda: train(plain)),
        "resident, weights off by one rounding": (resident, lambda: train(plain, change=nudged(plain))),
        "cpu": (resident, lambda: train(described(cpu, given.precision, **shape))),
        "cpu, waiting after every hand-over": (
            resident,
            lambda: train(described(cpu, given.precision, **shape), change=in_turn),
        ),
        "ratio 0.5": (resident, lambda: train(described(half, given.precision, **shape))),
        "ratio 0.5, waiting after every hand-over": (
            resident,
            lambda: train(described(half, given.precision, **shape), change=in_turn),
        ),
    }
    sgd = {"type": "SGD", "lr": 0.05}
    smooth = train(described({}, given.precision, optim=sgd, **shape))
    runs["cpu with SGD, which does not blow up roundings"] = (
        smooth,
        lambda: train(described(cpu, given.precision, optim=sgd, **shape)),
    )
    for name, (base, make) in runs.items():
        loss, worst, whose = apart(base, make())
        show(name, f"loss off by {loss:.2e}, {whose or 'state'} by {worst:.2e}")
    torch.use_deterministic_algorithms(True, warn_only=True)
    exact = train(plain)
    for name, strategy in (("resident again", {}), ("cpu", cpu)):
        loss, worst, whose = apart(exact, train(described(strategy, given.precision, **shape)))
        show(f"deterministic kernels: {name}", f"loss off by {loss:.2e}, {whose or 'state'} by {worst:.2e}")


if __name__ == "__main__":
    main()
