"""On a real device: the host queues a step without waiting for the one under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.engine import Preparation, StepResult
from plait.models import LossTerm
from plait.trainer import Hook

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LLAMA = {"type": "llama", "vocab_size": 512, "dim": 256, "layers": 2, "heads": 4, "kv_heads": 2, "seq_len": 128}
A_WHILE = 2_000_000_000
"""Cycles that keep the device busy for about a second."""
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the whole queue raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tokens(*, pinned: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(512, (2, 129))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    return {name: tensor.pin_memory() for name, tensor in batch.items()} if pinned else batch


def llama(**sections: Any) -> Any:
    from plait.config import parse_sections
    from plait.distributed import open_world
    from plait.engine import prepare_native

    config = parse_sections(
        model=LLAMA, **{"precision": "bf16", "optim": {"type": "AdamW"}, "device": "cuda", **sections}
    ).config
    return prepare_native(Preparation(config, open_world(config), log=lambda _text: None))


class Slow(nn.Module):
    """A model that the device is long busy with, and the host is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.cycles = 0

    def forward(self, x: Tensor) -> LossTerm:
        if self.cycles:
            torch.cuda._sleep(self.cycles)
        error = self.layer(x).square()
        return LossTerm(error.sum(), error.numel())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("train", [{"clip_norm": 1.0}, {"clip_norm": None}], ids=["clipped", "unclipped"])
def test_no_step_waits_for_its_device(precision: str, micro_batches: int, train: dict[str, Any]) -> None:
    engine = llama(precision=precision, train=train)
    batches = [tokens() for _ in range(micro_batches)]
    for _ in range(3):  # kernels are loaded, the divisor is chosen
        engine.train_step(batches)
    with no_waiting():
        results = [engine.train_step(batches) for _ in range(5)]
    assert all(result.asynchronous for result in results)
    assert results[-1].loss < results[0].loss


def test_a_compiled_step_does_not_wait_either() -> None:
    engine = llama(strategy={"compile": {"scope": "block"}})
    for _ in range(3):
        engine.train_step([tokens()])
    batch = tokens()
    with no_waiting():
        for _ in range(3):
            engine.train_step([batch])


def test_a_step_returns_while_the_device_is_at_work_on_the_one_before() -> None:
    model = Slow()
    engine: Any = plait.prepare(model, device="cuda", optim={"type": "AdamW"})
    batch = (torch.randn(4, 8).pin_memory(),)
    for _ in range(3):
        engine.train_step([batch]).wait()
    model.cycles = A_WHILE
    first = engine.train_step([batch])
    queued = torch.cuda.Event()
    queued.record()
    assert not queued.query()  # the host is back, the device is not
    model.cycles = 0
    second = engine.train_step([batch])  # waits for the first, so that the host is not two steps ahead
    assert first.loss == first.loss
    assert second.loss < first.loss


def test_inputs_travel_while_the_device_works() -> None:
    engine: Any = plait.prepare(Slow(), device="cuda", optim={"type": "AdamW"})
    batch = (torch.randn(4, 8).pin_memory(),)
    engine.train_step([batch]).wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(A_WHILE)
    busy = torch.cuda.Event()
    busy.record()
    move = engine._forward._move
    engine._forward.ready(batch)
    move._line.synchronize()
    assert not busy.query()  # the copy is done, the work before it is not


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_an_accelerate_loop_that_clips_does_not_wait(precision: str) -> None:
    from plait.frontends.accelerate import Accelerator

    accelerator = Accelerator(mixed_precision=precision)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    own = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, scheduler = accelerator.prepare(net, own, torch.optim.lr_scheduler.StepLR(own, 100))
    batch = torch.randn(4, 8).pin_memory()

    def step() -> Tensor:
        accelerator.backward(model(batch).square().mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert norm is not None
        return norm

    for _ in range(3):
        step()
    with no_waiting():
        norms = [step() for _ in range(5)]
    assert all(norm.shape == () and norm.device.type == "cuda" and norm > 0 for norm in norms)


def test_a_trainer_that_clips_waits_only_where_it_logs(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from plait.frontends.transformers import PlaitTrainer

    class Watched(PlaitTrainer):  # type: ignore[misc]
        watched = 0

        def _clip_grad_norm(self, model: nn.Module) -> Tensor:
            if self.state.global_step >= 3:  # kernels are loaded
                self.watched += 1
                torch.cuda.set_sync_debug_mode("error")
            norm: Tensor = super()._clip_grad_norm(model)
            return norm

    class Ends(transformers.TrainerCallback):  # type: ignore[misc]
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (64, 12))]
    args = transformers.TrainingArguments(
        str(tmp_path), report_to="none", max_steps=8, logging_steps=4, save_strategy="no", bf16=True,
        per_device_train_batch_size=4, max_grad_norm=0.5,
    )  # fmt: skip
    trainer = Watched(transformers.LlamaForCausalLM(config), args, train_dataset=data, callbacks=[Ends()])
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.watched == 5
    assert [entry["grad_norm"] > 0 for entry in trainer.state.log_history if "grad_norm" in entry] == [True, True]


class Watch(Hook):
    """Lets nobody wait, between two steps that are logged."""

    def after_step(self, runner: plait.Runner, result: StepResult) -> None:
        torch.cuda.set_sync_debug_mode("error" if 12 <= runner.step < 19 else "default")


def test_a_run_waits_only_where_it_logs(tmp_path: Path) -> None:
    runner = plait.Runner(
        model=LLAMA,
        data=[{name: tensor[0] for name, tensor in tokens(pinned=False).items()} for _ in range(64)],
        batch={"total": 4},
        train={"max_steps": 24},
        precision="bf16",
        optim={"type": "AdamW"},
        log={"console": "none", "sinks": [], "every": 10},
        checkpoint={"last": False},
        work_dir=tmp_path,
        device="cuda",
        hooks=[Watch()],
    )
    try:
        runner.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        runner.close()
    assert runner.step == 24


def test_the_profiler_sees_no_wait_for_a_whole_stream() -> None:
    engine = llama()
    batch = tokens()
    for _ in range(3):
        engine.train_step([batch])
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(4):
            with torch.profiler.record_function("a step"):
                engine.train_step([batch])
    steps = [event for event in profile.events() if event.name == "a step"]
    inside = [
        event.name
        for event in profile.events()
        if event.name in WAITS and any(s.time_range.start <= event.time_range.start <= s.time_range.end for s in steps)
    ]
    assert inside == []
