"""Runs a short training, and records the full state after each step."""

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
from plait.prove import DropoutSwitch, ProofTrace, compare, perturb_weights, running_statistics
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
    """Rows of random tokens with very different numbers of targets.

    So the mean loss over all targets differs from a mean of per-rank means, and a part that computes the latter fails.
    """

    def __init__(self, rows: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._ids = torch.randint(0, VOCAB, (rows, SEQ + 1), generator=generator)
        masked = torch.rand(rows, SEQ, generator=generator) < torch.rand(rows, 1, generator=generator) * 0.9
        self._labels = self._ids[:, 1:].masked_fill(masked, -100)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index, :-1], "labels": self._labels[index]}


def full_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full copies of tensors, gathered if they are sharded. Every rank must call it."""
    return {
        name: (tensor.full_tensor() if is_sharded(tensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }


@dataclass
class RecordedRun:
    """What a run computed at each step, with full tensors in host memory."""

    trace: ProofTrace = field(default_factory=ProofTrace)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    """Weights, buffers, optimizer state and the tensors of hooks: before the first step, and after each."""

    def against(self, reference: RecordedRun) -> ProofTrace:
        """Return this run's trace, after computing the deviation of each tensor from the reference, step by step."""
        names = list(reference.states[-1])
        begun = [name for name in names if name in reference.states[0]]
        self.trace.deviations = [
            compare(reference.at(step), self.at(step), names if step else begun, step=step)
            for step in range(len(reference.states))
        ]
        return self.trace

    def at(self, step: int) -> AtStep:
        """Return the tensors at the start of the run and after a step."""
        return AtStep(InMemory(self.states[0]), InMemory(self.states[step]))


class InMemory:
    """Tensors by name, with the attribute and method that `compare` reads: `entries` and `read`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.entries = {name: TensorEntry(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    def read(self, name: str) -> Tensor:
        """Return a tensor."""
        return self._tensors[name]


@dataclass
class AtStep:
    """The tensors of a run at its start and after a step."""

    start: InMemory
    now: InMemory


class StepRecorder(Hook):
    """Records each step, after all other hooks."""

    name = "plait.testing"
    priority = 10_000

    def __init__(self, perturbation: float) -> None:
        self.recorded = RecordedRun()
        self._perturbation = perturbation

    def before_run(self, runner: Runner) -> None:
        """Turn off dropout, which differs between layouts, and record the initial state."""
        model = runner.engine.model
        DropoutSwitch(model)
        self.recorded.trace.uncompared = running_statistics(model)
        if self._perturbation:
            perturb_weights(runner.engine, self._perturbation)
        self._record_state(runner)

    def after_step(self, runner: Runner, result: StepResult) -> None:
        """Record the step."""
        trace = self.recorded.trace
        trace.loss.append(result.loss)
        trace.grad_norm.append(result.grad_norm)
        trace.targets.append(result.targets)
        trace.skipped.append(result.skipped)
        self._record_state(runner)

    def _record_state(self, runner: Runner) -> None:
        tensors = {**runner.engine.state_tensors()}
        for name, hook in runner.hooks.named().items():
            tensors.update({f"hook.{name}.{key}": tensor for key, tensor in hook.tensors(runner).items()})
        left_out = set(runner.world.gather(self.recorded.trace.uncompared)[0])
        local = {name: tensor.cpu() for name, tensor in full_tensors(tensors).items() if name not in left_out}
        # Each pipeline stage has only its own parameters.
        stages = runner.world.gather(local) if runner.world.layout.pp > 1 else [local]
        state = {name: tensor for stage in reversed(stages) for name, tensor in stage.items()}
        self.recorded.states.append(state)
        self.recorded.trace.names = list(state)


def record(rank: int, size: int, given: dict[str, Any], perturbation: float = 0.0) -> RecordedRun | None:
    """Train with the keywords of `Runner`; rank 0 returns what was recorded."""
    recorder = StepRecorder(perturbation)
    hooks = [*given.pop("hooks", ()), recorder]
    with Runner(hooks=hooks, **given) as runner:
        runner.train()
    return recorder.recorded if rank == 0 else None
