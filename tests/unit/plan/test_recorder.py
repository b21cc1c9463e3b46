"""What the recorder counts on tensors without values is what a real step allocates, to the byte."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from plait.config import parse_sections
from plait.config.run import RunConfig
from plait.distributed import open_world
from plait.distributed.fake import fake_world
from plait.engine import Preparation, prepare_native
from plait.launch.heartbeat import Phase
from plait.plan.hardware import find_hardware
from plait.plan.recorder import MemoryRecorder
from plait.plan.simulate import simulate

SIZES = {"vocab_size": 512, "dim": 64, "layers": 2, "heads": 4, "seq_len": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "type": "llama", "kv_heads": 2, "ffn_dim": 160},
    "gpt": {**SIZES, "type": "gpt"},
    "moe": {**SIZES, "type": "moe", "experts": 4, "top_k": 2, "expert_dim": 48},
}


def config_of(model: str, recompute: str) -> RunConfig:
    return parse_sections(
        model=MODELS[model],
        batch={"micro": 2, "accumulation": 2},
        strategy={"recompute": recompute},
        optim={"type": "AdamW"},
        train={"clip_norm": 1.0},
        device="cpu",
    ).config


def tokens() -> dict[str, torch.Tensor]:
    return {key: torch.randint(0, 512, (2, 64)) for key in ("input_ids", "labels")}


def really_allocated(config: RunConfig) -> int:
    """The most that torch's CPU allocator had given out, as torch's own profiler saw it: every piece, hidden or not."""
    with open_world(config) as world, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        engine = prepare_native(Preparation(config, world, accumulation=2))
        for _ in range(2):
            engine.train_step([tokens() for _ in range(2)])
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda e: e[0])
    return max(accumulate(change for _, change in changes))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_the_peak_of_a_simulated_step_is_that_of_a_real_one(model: str, recompute: str) -> None:
    config = config_of(model, recompute)
    simulated = simulate(config, find_hardware("cpu"), ranks=1).ledger.peak[1]
    # A recomputed block keeps the state of the random numbers, which no operation makes.
    states = SIZES["layers"] * torch.get_rng_state().nbytes if recompute == "full" else 0
    assert really_allocated(config) == simulated + states


@pytest.fixture
def recorder() -> Any:
    config = parse_sections(model=MODELS["gpt"]).config
    with fake_world(config):
        made = MemoryRecorder("cpu")
        with made.recording():
            yield made


def test_memory_is_free_again_when_its_last_view_is_gone(recorder: MemoryRecorder) -> None:
    whole = torch.empty(10, 100)
    part = whole[3]
    assert recorder.in_use == 4000
    del whole
    assert recorder.in_use == 4000
    del part
    assert recorder.in_use == 0


def test_a_storage_that_is_resized_counts_by_its_new_size(recorder: MemoryRecorder) -> None:
    held = torch.empty(100)
    held.untyped_storage().resize_(0)
    assert recorder.in_use == 0
    held.untyped_storage().resize_(80)
    assert recorder.in_use == 80


def test_a_phase_has_its_own_peak_and_begins_with_what_is_held(recorder: MemoryRecorder) -> None:
    kept = torch.empty(250)
    recorder.enter(Phase.FORWARD)
    torch.empty(1000)
    recorder.enter(Phase.STEP)
    assert {phase: peak.bytes for phase, peak in recorder.peaks.items()} == {
        Phase.BUILD: 1000,
        Phase.FORWARD: 5000,
        Phase.STEP: 1000,
    }
    del kept


def test_what_runs_inside_a_backward_pass_is_of_the_backward_phase(recorder: MemoryRecorder) -> None:
    recorder.enter(Phase.FORWARD)
    seen = []
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(lambda grad: seen.append(recorder.current_phase()))
    layer(torch.empty(2, 4)).sum().backward()
    assert seen == [Phase.BACKWARD]
    assert recorder.current_phase() is Phase.FORWARD


def test_what_happens_aside_is_seen_by_the_other_only(recorder: MemoryRecorder) -> None:
    with recorder.nested() as other:
        torch.empty(500)
    assert max(peak.bytes for peak in other.peaks.values()) == 2000
    assert recorder.in_use == 0
    assert not recorder.peaks[Phase.BUILD].bytes
