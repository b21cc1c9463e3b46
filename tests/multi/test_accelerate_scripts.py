"""Scripts with more than one model, more than one backward pass, or none: as real Accelerate runs them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.multi.nets import DIM, Layer
from tests.multi.ranks import RankPool
from tests.multi.test_accelerate_parity import Regression, rows

TOLERANCE = 2e-6


def two_networks(accelerator: Any) -> list[float]:
    """A generator and a critic, each with an optimizer; one loss goes through both, another through one of them."""
    maker, critic = nn.Sequential(Layer(), nn.Linear(DIM, DIM)), nn.Sequential(Layer(), nn.Linear(DIM, 1))
    first = torch.optim.AdamW(maker.parameters(), lr=1e-2)
    second = torch.optim.SGD(critic.parameters(), lr=1e-2)
    loader = DataLoader(rows(), batch_size=4)
    maker, critic, first, second, loader = accelerator.prepare(maker, critic, first, second, loader)
    losses = []
    for x, _, _ in loader:
        second.zero_grad()
        made = maker(x)
        accelerator.backward(critic(x).square().mean())  # two complete passes before one step
        doubt = (critic(made.detach()) - 1).square().mean()
        accelerator.backward(doubt)
        second.step()
        first.zero_grad()
        belief = critic(made).square().mean()
        accelerator.backward(belief)  # leaves gradients in the critic, which zero_grad above forgets
        first.step()
        losses += [doubt.item(), belief.item()]
    return losses


def one_optimizer_for_two(accelerator: Any) -> list[float]:
    encoder, head = nn.Sequential(Layer(), Layer()), nn.Linear(DIM, 1)
    optimizer = torch.optim.AdamW(itertools.chain(encoder.parameters(), head.parameters()), lr=1e-2)
    encoder, head, optimizer, loader = accelerator.prepare(
        encoder, head, optimizer, DataLoader(rows(), batch_size=4, shuffle=True)
    )
    losses = []
    for x, y, _ in loader:
        with accelerator.accumulate(encoder, head):
            loss = nn.functional.mse_loss(head(encoder(x)).squeeze(-1), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                both = [*encoder.parameters(), *head.parameters()]
                losses.append(float(accelerator.clip_grad_norm_(both, 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def no_sync_and_forgetting(accelerator: Any) -> list[float]:
    """Passes inside `no_sync`, a step that is left out, gradients clipped by value, a schedule that ends."""
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(rows(), batch_size=2, shuffle=True), schedule
    )
    losses = []
    for number, (x, y, _) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x)["prediction"], y)
        losses.append(loss.item())
        if number % 3 == 0:
            with accelerator.no_sync(model):
                accelerator.backward(loss)
            continue
        accelerator.backward(loss)
        if number % 3 == 2:
            optimizer.zero_grad()
            continue
        accelerator.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(schedule.get_last_lr()[0])
    return losses


class Stream(IterableDataset[Any]):
    """Numbers one after another; how many, it does not say."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(torch.arange(self.count, dtype=torch.float32))


def streams(accelerator: Any) -> list[Any]:
    """A data set without a length, read once through rank 0."""
    loader = accelerator.prepare(DataLoader(Stream(19), batch_size=4))
    seen = [batch.tolist() for batch in loader]
    return [seen, [batch.tolist() for batch in loader]]


SCRIPTS = {
    "two networks": (two_networks, {}),
    "one optimizer": (one_optimizer_for_two, {"gradient_accumulation_steps": 2}),
    "no sync": (no_sync_and_forgetting, {}),
    "streams": (streams, {}),
}


def run_scripts(rank: int, size: int, sections: dict[str, Any] | None) -> dict[str, Any]:
    """Under real Accelerate where there are no sections."""
    if sections is None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState
    else:
        from plait.frontends.accelerate import Accelerator  # type: ignore[assignment]
    found = {}
    for name, (script, options) in SCRIPTS.items():
        torch.manual_seed(7)
        if sections is None:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()
            found[name] = script(Accelerator(cpu=True, **options))
        else:
            found[name] = script(Accelerator(cpu=True, sections=sections, **options))
    return found


@pytest.fixture(scope="module")
def real(two_ranks: RankPool) -> list[dict[str, Any]]:
    pytest.importorskip("accelerate")
    return two_ranks.run(run_scripts, None)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unusual_scripts_equal_real_accelerate(two_ranks: RankPool, real: list[dict[str, Any]], stage: int) -> None:
    ours = two_ranks.run(run_scripts, {"strategy": {"zero": stage}})
    for rank in range(2):
        for name, expected in real[rank].items():
            if name == "streams":
                assert ours[rank][name] == expected
            else:
                assert ours[rank][name] == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE), name


def language_model(accelerator: Any, batch: int) -> list[float]:
    """A model of `transformers` that computes its loss itself."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(0, 50, (16, 8), generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(ids, batch_size=batch))
    losses = []
    for tokens in loader:
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += [float(accelerator.gather(loss.detach()).mean()), float(norm)]
    return losses


def run_language_model(rank: int, size: int) -> tuple[list[float], list[float]]:
    from accelerate import Accelerator as Real
    from accelerate.state import AcceleratorState, GradientState

    from plait.frontends.accelerate import Accelerator, ParallelismConfig

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.manual_seed(7)
    real = language_model(Real(cpu=True), batch=2)
    torch.manual_seed(7)
    return real, language_model(Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2)), batch=4)


def test_ranks_that_share_layers_see_the_same_batches(two_ranks: RankPool) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    for real, ours in two_ranks.run(run_language_model):
        assert ours == pytest.approx(real, rel=1e-5)


def talk(utils: Any, rank: int) -> list[Any]:
    """The functions of `accelerate.utils` that need no Accelerator."""
    own = {"x": torch.arange(3.0) + 10 * rank, "more": [torch.tensor(float(rank)), "text"]}
    ragged = torch.full((rank + 1, 2), float(rank))
    utils.wait_for_everyone()
    return [
        utils.gather(own["x"]),
        utils.gather({"a": (own["x"], own["more"][0].reshape(1))}),
        utils.reduce(own["x"]),
        utils.reduce(own["x"], reduction="sum"),
        utils.pad_across_processes(ragged, pad_index=-1),
        utils.pad_across_processes(ragged, dim=0, pad_first=True),
        utils.broadcast(own["x"].clone(), from_process=1),
        utils.send_to_device(own, "cpu"),
        utils.send_to_device({"x": own["x"], "y": own["x"]}, "meta", skip_keys="y")["y"],
    ]


def run_talks(rank: int, size: int) -> tuple[list[Any], list[Any]]:
    from accelerate import Accelerator, utils
    from accelerate.state import AcceleratorState, GradientState

    from plait.frontends.accelerate import utils as ours

    Accelerator(cpu=True)
    real = talk(utils, rank)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return real, talk(ours, rank)


def test_functions_of_utils_say_what_real_ones_say(two_ranks: RankPool) -> None:
    pytest.importorskip("accelerate")
    for real, ours in two_ranks.run(run_talks):
        for wanted, found in zip(real, ours, strict=True):
            assert str(found) == str(wanted)
