"""Several stages of a pipeline on one rank look like the model that they are parts of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.distributed.ddp import persistent_buffers
from plait.engine.parallelize import StageSet


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("passing", torch.zeros(2), persistent=False)


class Part(nn.Module):
    """Layers of a model, under their numbers in it."""

    def __init__(self, *layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(layer): Block() for layer in layers})


@pytest.fixture
def stages() -> StageSet:
    return StageSet([Part(0, 1), Part(4, 5)])


def test_modules_have_their_names_in_the_whole_model(stages: StageSet) -> None:
    found = {name: module for name, module in stages.named_modules() if isinstance(module, nn.Linear)}
    assert list(found) == [f"blocks.{layer}.linear" for layer in (0, 1, 4, 5)]
    for name, module in found.items():
        assert stages.get_submodule(name) is module
    with pytest.raises(AttributeError):
        stages.get_submodule("blocks.2")


def test_a_checkpoint_holds_the_buffers_that_those_of_other_layouts_hold(stages: StageSet) -> None:
    names = [name for name, _ in persistent_buffers(stages)]
    assert names == [f"blocks.{layer}.kept" for layer in (0, 1, 4, 5)]
    assert set(names) == {name for name in stages.state_dict() if "linear" not in name}
