"""An Accelerate script with only its import changed: step by step what real Accelerate does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.multi.nets import DIM, Layer
from tests.multi.ranks import RankPool

ROWS = 23  # neither a multiple of the batch nor of the ranks: last rounds are short
TOLERANCE = 2e-6


class Regression(nn.Module):
    block_classes = (Layer,)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(2)))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Any:
        return {"prediction": self.head(self.dropout(self.layers(x))).squeeze(-1)}


def rows(count: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, DIM, generator=generator)
    return TensorDataset(x, x.sum(dim=1).sin(), torch.arange(count))


def script(make: Any, **options: Any) -> dict[str, Any]:
    """A training script, as people write them. `make` is the Accelerator class, real or ours."""
    clip, epochs = options.pop("clip", None), options.pop("epochs", 2)
    torch.manual_seed(11)
    accelerator = make(**options)
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
    train = DataLoader(rows(), batch_size=4, shuffle=True)
    test = DataLoader(rows(), batch_size=6)
    # In an unusual order, and the test loader by itself.
    scheduler, model, train, optimizer = accelerator.prepare(scheduler, model, train, optimizer)
    test = accelerator.prepare(test)
    story: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "seen": [], "lengths": [len(train), len(test)]}
    for _ in range(epochs):
        model.train()
        for x, y, index in train:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x)["prediction"], y)
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip is not None:
                    norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                    story["norms"].append(float(norm))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            story["losses"].append(loss.item())
            story["rates"].append(scheduler.get_last_lr()[0])
            story["seen"].append(index.tolist())
    model.eval()
    answers, indices = [], []
    for x, _, index in test:
        with torch.no_grad():
            answers.append(accelerator.gather_for_metrics(model(x)["prediction"]))
        indices += accelerator.gather_for_metrics(index).tolist()
    story["indices"], story["answers"] = indices, torch.cat(answers).float().tolist()
    story["gathered"] = accelerator.gather(torch.tensor(float(accelerator.process_index))).tolist()
    story["reduced"] = accelerator.reduce(torch.ones(2) * (1 + accelerator.process_index), "mean").tolist()
    ragged = torch.ones(1 + accelerator.process_index, 2)
    story["padded"] = accelerator.pad_across_processes(ragged, pad_index=-1).tolist()
    state = accelerator.get_state_dict(model)
    story["weights"] = {name: tensor.clone() for name, tensor in state.items()}
    return story


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 4, "clip": 0.3},
    "split": {"split_batches": True, "clip": 5.0},
    "seeded": {"seedable": True},
    "bf16": {"mixed_precision": "bf16", "clip": 0.3},
}
SHARDED: dict[str, dict[str, Any]] = {
    "plain": {"strategy": "zero1"},
    "accumulated": {"strategy": "zero2"},
    "split": {"strategy": "zero3"},
    "seeded": {"strategy": "fsdp"},
    "bf16": {"strategy": "zero3"},
}


def _options(module: Any, case: str) -> dict[str, Any]:
    options = dict(CASES[case])
    loading = module.DataLoaderConfiguration(
        split_batches=options.pop("split_batches", False),
        use_seedable_sampler=options.pop("seedable", False),
        data_seed=3,
    )
    return {"cpu": True, "dataloader_config": loading, **options}


def run_real(rank: int, size: int) -> dict[str, Any]:
    from accelerate import Accelerator, utils
    from accelerate.state import AcceleratorState, GradientState

    stories = {}
    for case in CASES:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        stories[case] = script(Accelerator, **_options(utils, case))
    AcceleratorState._reset_state(True)
    return stories


def run_ours(rank: int, size: int, sharded: bool) -> dict[str, Any]:
    from plait.frontends.accelerate import Accelerator, utils

    cases = SHARDED if sharded else dict.fromkeys(CASES)
    return {case: script(Accelerator, sections=own, **_options(utils, case)) for case, own in cases.items()}


@pytest.fixture(scope="module")
def real(two_ranks: RankPool) -> list[dict[str, Any]]:
    pytest.importorskip("accelerate")
    return two_ranks.run(run_real)


def _compare(found: dict[str, Any], expected: dict[str, Any], case: str, *, tolerance: float) -> None:
    for key in ("seen", "indices", "lengths", "gathered", "reduced", "padded"):
        assert found[key] == expected[key], f"{case}: {key}"
    for key in ("losses", "norms", "rates", "answers"):
        assert found[key] == pytest.approx(expected[key], rel=tolerance, abs=tolerance), f"{case}: {key}"


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_script_equals_real_accelerate_step_by_step(
    two_ranks: RankPool, real: list[dict[str, Any]], sharded: bool
) -> None:
    ours = two_ranks.run(run_ours, sharded)
    for rank in range(2):
        for case, story in ours[rank].items():
            tolerance = 3e-2 if case == "bf16" else TOLERANCE
            _compare(story, real[rank][case], case, tolerance=tolerance)
    for case, story in ours[0].items():
        weights = real[0][case]["weights"]
        assert story["weights"].keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(story["weights"][name], weight, rtol=1e-4, atol=5e-2 if case == "bf16" else 1e-5)


def test_every_sample_is_counted_once_in_metrics(real: list[dict[str, Any]]) -> None:
    # Of real Accelerate first: the claim is worth as much as what it is compared with.
    assert sorted(real[0]["plain"]["indices"]) == list(range(ROWS))
