"""A private name that is gone is refused by its name, and found before anything needs it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch import nn

from plait import torch_internals, transformers_internals
from plait.errors import UnsupportedVersionError
from plait.torch_internals import Internal


def test_this_torch_has_every_name() -> None:
    assert torch_internals.missing_internals() == []


@pytest.mark.parametrize(
    "path",
    [
        "torch._foreach_not_there_",
        "torch.utils._not_there.tree_map",
        "torch.ops.aten._not_there",
        "torch.UntypedStorage._not_there",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._not_there",
    ],
)
def test_a_name_that_is_gone_is_found_missing(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    gone = Internal(path, "a test")
    monkeypatch.setattr(torch_internals, "ATTRIBUTES", (*torch_internals.ATTRIBUTES, gone))
    assert torch_internals.missing_internals() == [gone]


def test_a_name_that_only_some_releases_have_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    some = Internal("torch._not_there", "a test", "2.11")
    monkeypatch.setattr(torch_internals, "ATTRIBUTES", (some,))
    assert torch_internals.missing_internals() == []


def test_an_import_of_a_name_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_internals.NAMES, "not_there", Internal("torch._not_there", "a test"))
    with refused(UnsupportedVersionError, "torch._not_there", torch.__version__, "2.11–2.15"):
        torch_internals.not_there  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(AttributeError, match="never_listed"):
        torch_internals.never_listed  # type: ignore[attr-defined] # noqa: B018


def test_a_patch_of_a_method_that_is_gone_is_refused_and_changes_nothing() -> None:
    state: Any = SimpleNamespace()
    with pytest.raises(UnsupportedVersionError, match=r"SimpleNamespace\._register_pre_backward_hook"):
        torch_internals.fsdp_wrap_register_pre_backward_hook(state, lambda register: register)
    assert vars(state) == {}


@pytest.mark.parametrize("ask", [torch_internals.device_guards, torch_internals.cuda_hooks_layout])
def test_a_table_whose_size_the_system_does_not_say_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[], Any]
) -> None:
    monkeypatch.setattr(torch_internals, "_size_of_symbol", lambda address: None)
    with refused(UnsupportedVersionError, torch.__version__, "device: cpu"):
        ask()


def test_a_module_without_the_attribute_is_refused() -> None:
    layer = nn.Linear(2, 2)
    del layer.__dict__["_forward_hooks"]
    with pytest.raises(UnsupportedVersionError, match="_forward_hooks"):
        torch_internals.is_hooked(layer)


@pytest.mark.parametrize(
    "groups", [{"_fsdp_param_group": "one"}, {"_fsdp_param_groups": ["one"]}], ids=["2.11", "2.12"]
)
def test_the_groups_of_a_sharded_module_are_found_in_every_release(groups: dict[str, Any]) -> None:
    assert torch_internals.fsdp_param_groups(SimpleNamespace(**groups)) == ["one"]


def test_a_sharded_module_without_groups_in_a_release_of_which_nobody_knows_is_refused() -> None:
    with pytest.raises(UnsupportedVersionError, match="_fsdp_param_group"):
        torch_internals.fsdp_param_groups(SimpleNamespace())


def test_an_override_of_a_method_that_is_gone_is_refused() -> None:
    class Theirs:
        def _load(self) -> None: ...

    @transformers_internals.overrides
    class Fits(Theirs):
        def _load(self) -> None: ...

    class Stale(Theirs):
        def _restore(self) -> None: ...

    with pytest.raises(UnsupportedVersionError, match="_restore"):
        transformers_internals.overrides(Stale)
