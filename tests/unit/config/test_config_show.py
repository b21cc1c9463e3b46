"""Writing a run description out: it parses back to the same, and passes the same rules."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.config import RunConfig, check, describe, parse, parse_sections, to_dict, to_yaml

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
tricky = text | st.sampled_from(
    ["3e-4", "1e5", "012", "null", "true", "~", "<<", "=", "- a", "2024-01-01", "1:30", "#"]
)
# A variable in a path is replaced by its value, and refused where it has none: see test_config_parse.
paths = tricky.filter(lambda path: path.strip() and "\0" not in path and not re.search(r"\$[\w{]", path))
floats = st.floats(1e-12, 1e12)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | tricky
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(tricky, inner, max_size=3), max_leaves=8
)
fraction = st.floats(0, 1, exclude_max=True)


def some(**keys):
    """A mapping with any of the keys."""
    return st.fixed_dictionaries({}, optional=keys)


def typed(name, **keys):
    return some(**keys).map(lambda mapping: {"type": name, **mapping})


imported = typed("import", args=st.dictionaries(tricky, values, max_size=3)).map(lambda m: {**m, "target": "m:f"})
runs = some(
    work_dir=paths,
    seed=st.integers(0, 2**63 - 1),
    timeout_s=floats,
    model=imported
    | typed("gpt", dim=st.just(96), dropout=fraction)
    | st.fixed_dictionaries({"type": st.just("hf"), "config": st.dictionaries(tricky, values, max_size=3)}),
    data=imported | typed("text", cache=paths, split=st.just("train")).map(lambda m: {**m, "path": "3e-4"}),
    batch=some(total=st.integers(1, 10**6), micro=st.none()),
    optim=typed("AdamW", lr=floats, betas=st.tuples(fraction, fraction), no_decay=st.lists(tricky, max_size=3))
    | typed("Adafactor", eps=st.tuples(st.none() | floats, floats))
    | some(lr=floats),
    schedule=st.none()
    | typed("CosineAnnealingLR", warmup=st.integers(0, 9))
    | typed("MultiStepLR").map(lambda m: {**m, "milestones": [1, 2]}),
    precision=st.sampled_from(["fp32", "bf16"]) | st.just({"compute": "fp16", "scaler": {"static": 4.0}}),
    strategy=st.sampled_from(["single", "ddp", "zero1", "zero3", "fsdp"])
    | some(zero=st.integers(1, 3), compile=st.booleans(), recompute=st.sampled_from(["full", "every", "selective"]))
    | some(compile=some(mode=tricky, dynamic=st.none() | st.booleans())),
    hooks=st.lists(typed("ema", decay=st.just(0.5)) | imported, max_size=3),
)


@settings(max_examples=60)
@given(runs)
def test_yaml_parses_back_to_an_equal_run_that_passes_the_same_rules(tmp_path_factory, source):
    config = parse_sections(**source).config
    check(config, has_val=False, require_length=False)
    path = tmp_path_factory.mktemp("round") / "run.yaml"
    path.write_text(to_yaml(config), encoding="utf-8", newline="")
    again = parse(path).config
    assert again == config
    check(again, has_val=False, require_length=False)


@settings(max_examples=60)
@given(runs)
def test_the_dict_survives_json(source):
    config = parse_sections(**source).config
    assert parse(json.loads(json.dumps(to_dict(config)))).config == config


def test_defaults_are_spelled_out():
    data = to_dict(RunConfig())
    assert data["optim"]["betas"] == [0.9, 0.999]
    assert data["train"]["guard"]["max_skips"] == 20


def test_keys_without_effect_are_left_out_so_that_the_result_can_be_run():
    data = to_dict(parse({"strategy": "zero3"}).config)
    assert "bucket_mb" not in data["strategy"]
    assert data["strategy"]["compile"] == {"enabled": False, "mode": None, "dynamic": None}


def test_a_contradiction_that_the_user_wrote_is_kept():
    data = to_dict(parse({"strategy": {"zero": 2, "sharding": "FULL_SHARD", "bucket_mb": 7}}).config)
    assert (data["strategy"]["zero"], data["strategy"]["sharding"]) == (2, "FULL_SHARD")
    assert data["strategy"]["bucket_mb"] == 7.0


def test_an_object_that_json_cannot_hold_becomes_its_repr(tmp_path):
    section = {"type": "import", "target": "m:f", "args": {"path": tmp_path, "kind": complex(1, 2), "shape": (1, 2)}}
    assert to_dict(parse_sections(model=section).config)["model"]["args"] == {
        "path": str(tmp_path),
        "kind": "(1+2j)",
        "shape": [1, 2],
    }


def test_the_type_of_a_section_stands_first():
    assert next(iter(to_dict(RunConfig())["optim"])) == "type"


def test_description_has_every_setting_with_value_and_origin():
    parsed = parse({"hooks": [{"type": "ema"}], "precision": "bf16"}, ["optim.lr=1"], origin="run.yaml")
    rows = {path: (value, origin) for path, value, origin in describe(parsed)}
    assert rows["precision.compute"] == ("bf16", "run.yaml")
    assert rows["hooks.0.type"] == ("ema", "run.yaml")
    assert rows["hooks.0.decay"] == (0.999, "default")
    assert rows["optim.lr"] == (1.0, "override")
    assert rows["optim.betas"] == ((0.9, 0.999), "default")
    assert rows["schedule"] == (None, "default")


@pytest.mark.parametrize("source", [{}, {"hooks": [{"type": "ema"}]}])
def test_every_row_of_a_description_has_an_origin(source):
    assert all(origin for _, _, origin in describe(parse(source)))
