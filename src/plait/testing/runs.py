"""A few steps of a run, with all that they did: what is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait.checkpoint import TensorEntry
from plait.distributed import is_sharded
from plait.engine import StepResult
from plait.prove import ProofTrace, Switch, compare, nudge_weights, running_statistics
from plait.trainer import Hook, Runner

VOCAB, SEQ = 61, 12
MODEL: dict[str, Any] = {
    "type": "llama",
    "vocab_size": VOCAB,
    "dim": 24,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "seq_len": SEQ,
}


class RandomTokens(Dataset[dict[str, Tensor]]):
    """Rows of random tokens, with very different numbers of targets: a mean of means would show."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._ids = torch.randint(0, VOCAB, (rows, SEQ + 1), generator=generator)
        masked = torch.rand(rows, SEQ, generator=generator) < torch.rand(rows, 1, generator=generator) * 0.9
        self._labels = self._ids[:, 1:].masked_fill(masked, -100)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index, :-1], "labels": self._labels[index]}


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, gathered where they are spread. Every rank must call it."""
    return {
        name: (tensor.full_tensor() if is_sharded(tensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }


@dataclass
class RecordedRun:
    """What a run did, step by step, with whole tensors on the host."""

    trace: ProofTrace = field(default_factory=ProofTrace)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    """Weights, buffers, optimizer state and the tensors of hooks: before the first step, and after each."""

    def against(self, reference: RecordedRun) -> ProofTrace:
        """This trace, with how far each tensor is from the reference's."""
        names = list(reference.states[-1])
        begun = [name for name in names if name in reference.states[0]]
        self.trace.deviations = [
            compare(reference.at(step), self.at(step), names if step else begun, step=step)
            for step in range(len(reference.states))
        ]
        return self.trace

    def at(self, step: int) -> AtStep:
        """The tensors after a step."""
        return AtStep(InMemory(self.states[0]), InMemory(self.states[step]))


class InMemory:
    """Tensors by name, as `compare` asks for them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.entries = {name: TensorEntry(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    def read(self, name: str) -> Tensor:
        """One of them."""
        return self._tensors[name]


@dataclass
class AtStep:
    """The tensors of a run at its start and after a step."""

    start: InMemory
    now: InMemory


class StepRecorder(Hook):
    """Writes down each step, after all other hooks."""

    name = "plait.testing"
    priority = 10_000

    def __init__(self, nudge: float) -> None:
        self.recorded = RecordedRun()
        self._nudge = nudge

    def before_run(self, runner: Runner) -> None:
        """Turn dropout off, which no two layouts draw alike, and note where the run begins."""
        model = runner.engine.model
        Switch(model)
        self.recorded.trace.uncompared = running_statistics(model)
        if self._nudge:
            nudge_weights(runner.engine, self._nudge)
        self._note(runner)

    def after_step(self, runner: Runner, result: StepResult) -> None:
        """Note what the step did."""
        trace = self.recorded.trace
        trace.loss.append(result.loss)
        trace.grad_norm.append(result.grad_norm)
        trace.targets.append(result.targets)
        trace.skipped.append(result.skipped)
        self._note(runner)

    def _note(self, runner: Runner) -> None:
        tensors = {**runner.engine.state_tensors()}
        for name, hook in runner.hooks.named().items():
            tensors.update({f"hook.{name}.{key}": tensor for key, tensor in hook.tensors(runner).items()})
        left_out = set(runner.world.gather(self.recorded.trace.uncompared)[0])
        here = {name: tensor.cpu() for name, tensor in whole(tensors).items() if name not in left_out}
        # Each rank of a pipeline has some of them.
        parts = runner.world.gather(here) if runner.world.layout.pp > 1 else [here]
        found = {name: tensor for part in reversed(parts) for name, tensor in part.items()}
        self.recorded.states.append(found)
        self.recorded.trace.names = list(found)


def record(rank: int, size: int, given: dict[str, Any], nudge: float = 0.0) -> RecordedRun | None:
    """Train with the keywords of `Runner`; rank 0 returns what happened."""
    recorder = StepRecorder(nudge)
    hooks = [*given.pop("hooks", ()), recorder]
    with Runner(hooks=hooks, **given) as runner:
        runner.train()
    return recorder.recorded if rank == 0 else None
