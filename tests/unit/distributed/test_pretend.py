"""CUDA on a machine that has none, and a machine that is as before when it is over."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait import torch_internals
from plait.config import parse_sections
from plait.distributed import fake
from plait.distributed.fake import fake_world
from plait.engine import Preparation, prepare_native
from plait.errors import UnsupportedVersionError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where a GPU is there, nothing is pretended")

CONFIG = parse_sections(
    model={"type": "llama", "vocab_size": 64, "dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "seq_len": 16},
    precision="bf16",
    optim={"type": "AdamW"},
    train={"clip_norm": 1.0},
).config


def guards() -> list[int | None]:
    return list(torch_internals.device_guards())


def surroundings() -> list[object]:
    """What pretending changes."""
    named = [getattr(torch.cuda, name) for name in fake._fake_cuda_module(1, 1, (9, 0))]
    others = [torch.tensor, torch.cuda._lazy_init, torch.Tensor.record_stream, torch.UntypedStorage.resize_]
    module = [nn.Module._apply, DeviceMesh.__init__]
    accelerator = torch.accelerator.current_accelerator()
    return [*named, *others, *module, guards(), accelerator, torch.autograd.is_multithreading_enabled()]


def real_backward() -> None:
    weight = torch.randn(5, 3, requires_grad=True)
    given = torch.randn(4, 5)
    (given @ weight).square().sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, 2 * given.T @ (given @ weight.detach()))


def test_a_step_on_cuda_runs_forward_backward_and_the_optimizer() -> None:
    with fake_world(CONFIG, device="cuda") as world:
        assert torch.cuda.is_available()
        engine = prepare_native(Preparation(CONFIG, world))
        assert {param.device.type for param in engine.model.parameters()} == {"cuda"}
        ids = torch.zeros(2, 16, dtype=torch.int64)
        engine.train_step([{"input_ids": ids, "labels": ids}])
        states = [value for state in engine.updater.optimizer.state.values() for value in state.values()]
        assert engine.steps == 1
        assert states
        assert {state.device.type for state in states if state.ndim} == {"cuda"}


def test_afterwards_all_is_as_before_and_real_tensors_work() -> None:
    before = surroundings()
    for _ in range(2):
        with fake.fake_cuda():
            assert torch.cuda.is_available()
        assert surroundings() == before
        assert not torch.cuda.is_available()
        real_backward()


def test_an_exception_restores_all_too() -> None:
    before = surroundings()
    with pytest.raises(ZeroDivisionError), fake_world(CONFIG, size=4, device="cuda"):
        1 / 0  # noqa: B018
    assert surroundings() == before
    assert not torch.distributed.is_initialized()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    real_backward()


def test_the_device_that_is_pretended_has_the_memory_that_was_asked_for() -> None:
    with fake.fake_cuda(devices=3, memory=7 * 2**30, capability=(8, 0)):
        assert torch.cuda.device_count() == 3
        assert torch.cuda.mem_get_info() == (7 * 2**30, 7 * 2**30)
        assert torch.cuda.get_device_capability() == (8, 0)


HEADER = """
// virtual bool inAComment() const;
struct Hooks {
  virtual ~Hooks() = default;
  virtual bool isBuilt() const { return false; }
  /* virtual int alsoNot(); */
  virtual bool isAvailable() const { return false; }
  virtual bool hasPrimaryContext(
      DeviceIndex device_index) const = 0;
  const Generator& getDefaultGenerator(int) const override;
  virtual const std::vector<int>& more(int a = -1) const { return them; }
};
"""


def test_virtual_functions_are_read_from_a_header_in_their_order() -> None:
    found = torch_internals._virtual_functions(HEADER)
    assert found == ["isBuilt", "isAvailable", "hasPrimaryContext", "more"]


def test_the_layout_that_the_headers_declare_is_the_one_in_the_library() -> None:
    places, count = torch_internals.cuda_hooks_layout()
    assert places == [2, 3, 4]
    assert count > 40


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("virtual bool isBuilt()", "virtual bool isCompiled()"),
        lambda text: text.replace("virtual void init()", "virtual void prepare(); virtual void init()"),
    ],
    ids=["renamed", "one more"],
)
def test_another_layout_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str]
) -> None:
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, **how: change(read(self, **how)))
    monkeypatch.setattr(fake, "cuda_device_guard_replaced", lambda: pytest.fail("the list of guards was reached"))
    before = surroundings()
    with pytest.raises(UnsupportedVersionError, match=re.escape(torch.__version__)), fake.fake_cuda():
        pass
    assert surroundings() == before
