"""What users may rely on."""

from __future__ import annotations

import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.refusals import refused
from torch import Tensor, nn

import plait
from plait.config import RunConfig
from plait.config.base import Section
from plait.config.part import CustomPart
from plait.errors import ConfigError
from plait.trainer import Runner

ROOT = Path(__file__).parents[2]
KINDS = ("Optim", "Schedule", "Model", "Data", "Objective", "Hook", "Metric", "Storage")
"""The last words of the names of sections with a `type`."""


@pytest.mark.parametrize("page", ["api.md", "zh-CN/api.md"])
def test_the_public_names_are_those_of_the_page(page: str) -> None:
    """Each stands there once, first in a row of a table."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (`plait\.[^|]*)\|", text)
    listed = [name for row in rows for name in re.findall(r"`plait\.(\w+)`", row)]
    assert sorted(listed) == sorted(plait.__all__)


PUBLIC_PACKAGES = ("plait.errors", "plait.frontends", "plait.testing")
GUIDES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in ("api.md", "architecture.md")]
GUIDES += [*ROOT.glob("README*.md"), *sorted((ROOT / "examples").rglob("*.py"))]
GUIDES.remove(ROOT / "examples" / "demo" / "demo.py")  # starts commands, and is no example of code


def named_in(text: str) -> set[str]:
    """The names inside packages of Plait that a guide imports, or writes with their whole path."""
    found = {
        f"{module}.{name}"
        for module, names in re.findall(r"from (plait\.[\w.]+) import (\([^)]*\)|[^\n]*)", text)
        for name in re.findall(r"\w+", names)
    }
    return found | set(re.findall(r"`(plait(?:\.[a-z_]\w*)+\.\w+)", text))


def test_what_guides_and_examples_import_is_public() -> None:
    """In docs/api.md by its own name, or by that of its module."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = {*re.findall(r"`(plait(?:\.[a-z_]\w*)+(?:\.\w+)?)`", page), *PUBLIC_PACKAGES}
    listed = {name for name in listed if name.count(".") > 1 or name in PUBLIC_PACKAGES}
    assert len(listed) > 20
    for name in listed:
        assert pkgutil.resolve_name(name) is not None
    private = {
        f"{guide.relative_to(ROOT)}: {name}"
        for guide in GUIDES
        for name in named_in(guide.read_text(encoding="utf-8"))
        if not any(f"{name}.".startswith(f"{each}.") for each in listed)
    }
    assert private == set()


def test_every_public_name_is_there() -> None:
    for name in plait.__all__:
        assert getattr(plait, name) is not None
        assert name in dir(plait)


def sections(model: type[Section]) -> Iterator[type[Section]]:
    for info in model.model_fields.values():
        for found in tree_of(info.annotation):
            yield found
            yield from sections(found)


def tree_of(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from tree_of(part)


def test_every_section_has_a_public_name_by_one_rule() -> None:
    """Its key, or its type and its key: `strategy.layout` is `Layout`, `{type: AdamW}` of `optim` is `AdamWOptim`."""
    public = {getattr(plait, name) for name in plait.__all__}
    own = {found for found in sections(RunConfig) if not issubclass(found, CustomPart)}  # others bring their own names
    assert own - public == set()
    for name in plait.__all__:
        found = getattr(plait, name)
        if isinstance(found, type) and issubclass(found, Section) and "type" in found.model_fields:
            word = str(found.model_fields["type"].default).replace("_", "")
            kind = next(kind for kind in KINDS if name.endswith(kind))
            assert name.removesuffix(kind).lower() in (word.lower(), f"{word}ed".lower())


def test_the_runner_has_a_keyword_for_each_key_of_a_run_description() -> None:
    keywords = set(inspect.signature(Runner.__init__).parameters) - {"self"}
    assert keywords == set(RunConfig.model_fields) | {"loss_fn", "collate_fn"}


def test_each_keyword_of_the_runner_reaches_its_key(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "batch": plait.Batch(total=6),
        "optim": plait.SGDOptim(lr=0.25),
        "schedule": plait.ConstantLRSchedule(),
        "precision": "bf16",
        "strategy": plait.Strategy(zero=1, layout=plait.Layout(dp_shard=1)),
        "train": plait.Train(max_steps=7),
        "checkpoint": {"keep": 2},
        "log": plait.Log(every=3),
        "plan": "off",
        "profile": plait.Profile(start=5),
        "work_dir": tmp_path,
        "seed": 9,
        "deterministic": True,
        "device": "cpu",
        "backend": "gloo",
        "timeout_s": 12.0,
        "trust_code": True,
        "hooks": [plait.EmaHook(decay=0.5)],
    }
    runner = Runner(lambda: None, [1], **given)  # type: ignore[arg-type,return-value]
    config = runner.config
    assert (config.batch.total, config.optim.lr, config.precision.compute) == (6, 0.25, "bf16")
    assert (config.strategy.zero, config.strategy.layout.dp_shard, config.train.max_steps) == (1, 1, 7)
    assert (config.checkpoint.keep, config.log.every, config.plan.gate) == (2, 3, "off")
    assert (config.profile, config.work_dir, config.seed) == (plait.Profile(start=5), str(tmp_path), 9)
    assert (config.deterministic, config.device, config.backend) == (True, "cpu", "gloo")
    assert (config.timeout_s, config.trust_code, config.hooks) == (12.0, True, (plait.EmaHook(decay=0.5),))
    assert config.schedule == plait.ConstantLRSchedule()


def test_no_keyword_of_the_runner_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        name: object() for name in RunConfig.model_fields if name not in ("model", "data", "val_data", "test_data")
    }
    listed = {name: [given[name]] for name in ("hooks", "metrics")}
    seen: dict[str, Any] = {}

    def parse_sections(**sections: Any) -> Any:
        seen.update(sections)
        raise ConfigError([])

    monkeypatch.setattr("plait.trainer.runner.parse_sections", parse_sections)
    with pytest.raises(ConfigError):
        Runner(**{**given, **listed})  # type: ignore[arg-type]
    assert seen == {**given, **listed}


def test_a_keyword_that_prepare_does_not_take_is_refused_with_the_one_that_was_meant() -> None:
    for keyword, meant in (("strateggy", "strategy"), ("batch", "accumulation"), ("clip_nrom", "clip_norm")):
        with pytest.raises(ConfigError) as refused:
            plait.prepare(lambda: None, **{keyword: 3})  # type: ignore[arg-type,return-value]
        (problem,) = refused.value.problems
        assert problem.path == keyword
        assert meant in problem.remedy


class Net(nn.Module):
    def __init__(self, dim: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


TINY = {"layers": 1, "dim": 8, "heads": 1, "vocab_size": 11, "seq_len": 4}


@pytest.mark.parametrize(
    ("model", "weight"),
    [
        (Net, "layer.weight"),
        (f"{__name__}:Net", "layer.weight"),
        ({"type": f"{__name__}:Net", "dim": 5}, "layer.weight"),
        ({"type": "gpt", **TINY}, "embedding.weight"),
        (plait.GptModel(**TINY), "embedding.weight"),  # type: ignore[arg-type]
    ],
    ids=["class", "name", "name with arguments", "mapping", "section"],
)
def test_prepare_takes_a_model_in_every_form(model: Any, weight: str) -> None:
    engine = plait.prepare(model, device="cpu")
    assert f"model.{weight}" in engine.state_tensors()


@pytest.mark.parametrize("model", [3, None, [Net]])
def test_prepare_refuses_what_is_no_model(model: Any) -> None:
    with refused(ConfigError, type(model).__name__, key="model"):
        plait.prepare(model)


@pytest.mark.parametrize(
    ("wrong", "key", "value"),
    [
        (lambda: plait.Strategy(zeroo=3), "Strategy.zeroo", "3"),  # type: ignore[call-arg]
        (lambda: plait.Strategy(zero=7), "Strategy.zero", "7"),
        (lambda: plait.AdamWOptim(lr="x"), "AdamW.lr", "'x'"),  # type: ignore[arg-type]
        (lambda: plait.Layout(tp=0), "Layout.tp", "0"),
    ],
)
def test_a_wrong_key_of_a_section_object_is_refused_as_in_a_file(
    wrong: Callable[[], Any], key: str, value: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        wrong()
    (problem,) = refused.value.problems
    assert problem.path == key
    assert value in problem.message


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(plait, "Trainer")


def test_importing_plait_loads_neither_torch_nor_pydantic() -> None:
    code = "import sys, plait; print([m for m in ('torch', 'pydantic', 'numpy', 'rich') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
