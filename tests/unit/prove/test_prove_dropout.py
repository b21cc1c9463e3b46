"""Dropout: off for comparing, watched when on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.config.model import GptConfig
from plait.models import build_model
from plait.prove.record import DropoutSwitch, random_state, record_random_calls


class Net(nn.Module):
    def __init__(self, fixed: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        self.drop_path = 0.25
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.layer(x), self.drop_path, self.training)
        return F.dropout(x, self.fixed, self.training)


def test_every_dropout_is_off_until_it_is_turned_on_again() -> None:
    net = Net()
    switch = DropoutSwitch(net)
    x = torch.randn(4, 8)
    assert torch.equal(net(x), net(x))
    assert switch.modules == ["", "layer.1"]
    switch.on()
    assert not torch.equal(net(x), net(x))
    assert (net.layer[1].p, net.drop_path) == (0.5, 0.25)


def test_dropout_that_stands_in_a_models_own_settings_is_off_too() -> None:
    model = build_model(GptConfig(vocab_size=30, dim=16, layers=1, heads=2, seq_len=8, dropout=0.3))
    switch = DropoutSwitch(model)
    ids = torch.randint(0, 30, (2, 8))
    before = random_state(torch.device("cpu"))
    model(input_ids=ids, labels=ids)
    assert random_state(torch.device("cpu")) == before
    switch.on()
    model(input_ids=ids, labels=ids)
    assert random_state(torch.device("cpu")) != before


def test_every_draw_is_seen_with_its_module_and_the_numbers_it_took() -> None:
    net = Net(fixed=0.1)
    x = torch.randn(4, 8)
    lists = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with record_random_calls(net, x.device) as calls:
            net(x)
        lists.append(calls)
    assert [draw.module for draw in lists[0]] == ["layer.1", "", ""]
    assert lists[0] == lists[1]
    assert all(a.numbers != b.numbers for a, b in zip(lists[0], lists[2], strict=True))


def test_watching_leaves_no_hooks_behind() -> None:
    net = Net()
    with record_random_calls(net, torch.device("cpu")):
        net(torch.randn(4, 8))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())
