"""`plait convert ds_config.json --to yaml`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.refusals import missing

from plait.cli.main import main
from plait.config import check, parse

CONFIG: dict[str, Any] = {
    "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "weight_decay": 0.1}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
}


@pytest.fixture
def plait(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command; gives its exit code, and what it said on both streams."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["plait", "convert", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text("// ours\n" + json.dumps(CONFIG))
    return path


def test_what_is_printed_is_a_run_description_with_its_account(plait: Any, source: Path, tmp_path: Path) -> None:
    code, out, err = plait(source, "--to", "yaml")
    assert code == 0
    found = yaml.safe_load(out)
    assert found["strategy"] == {"zero": 2}
    assert set(found) == {"batch", "optim", "strategy", "precision", "train"}
    (tmp_path / "run.yaml").write_text(out)
    config = parse(tmp_path / "run.yaml").config
    check(config, has_val=False, require_length=False)
    assert (config.optim.lr, config.precision.compute, config.batch.total) == (3e-5, "bf16", 16)
    for stream in (out, err):  # one may be sent to a file; the other is then still seen
        assert "zero_optimization.reduce_bucket_size" in stream
        assert "unneeded" in stream


@pytest.mark.parametrize("page", ["docs/deepspeed.md", "docs/zh-CN/deepspeed.md"])
def test_the_example_of_the_documents_is_what_is_printed(plait: Any, source: Path, page: str) -> None:
    text = (Path(__file__).parents[3] / page).read_text(encoding="utf-8")
    source.write_text(text.partition("```json\n")[2].partition("```")[0])
    shown = text.partition("```yaml\n")[2].partition("```")[0]
    out = plait(source, "--to", "yaml")[1]
    assert [line for line in shown.splitlines() if line not in out.splitlines()] == ["#   …"]
    assert yaml.safe_load(out) == yaml.safe_load(shown)


def test_a_target_is_written_once_and_replaced_only_when_asked(plait: Any, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "run.yaml"
    code, out, err = plait(source, target, "--to", "yaml")
    assert (code, out) == (0, "")
    assert source.name in err.splitlines()[0]
    assert parse(target).config.strategy.zero == 2
    assert plait(source, target, "--to", "yaml")[0] == 2
    assert plait(source, target, "--to", "yaml", "--overwrite")[0] == 0


def test_a_refused_key_ends_with_one_and_the_rest_is_printed(plait: Any, source: Path) -> None:
    source.write_text(json.dumps({**CONFIG, "sparse_gradients": True}))
    code, out, err = plait(source, "--to", "yaml")
    assert code == 1
    assert yaml.safe_load(out)["strategy"] == {"zero": 2}
    assert "refused" in err


def test_a_search_is_printed_as_a_file_of_its_own_would_be(plait: Any, source: Path, tmp_path: Path) -> None:
    source.write_text(json.dumps({"autotuning": {"enabled": True, "tuner_type": "random"}}))
    out = plait(source, "--to", "yaml")[1]
    after = out.partition("--search search.yaml`:\n")[2]
    assert yaml.safe_load("\n".join(line.removeprefix("#   ") for line in after.splitlines()))["tuner"] == "random"


def test_the_configuration_of_accelerate_is_recognised_too(plait: Any, tmp_path: Path) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n")
    code, out, _ = plait(path, "--to", "yaml")
    assert code == 0
    assert "Accelerate" in out.splitlines()[0]
    assert yaml.safe_load(out)["strategy"] == {"zero": 0}


def test_what_is_no_configuration_of_others_is_refused(plait: Any, source: Path, tmp_path: Path) -> None:
    ours = tmp_path / "run.json"
    ours.write_text(json.dumps({"strategy": "ddp", "seed": 1}))
    assert "already" in plait(ours, "--to", "yaml")[2]
    ours.write_text(json.dumps({"hidden_size": 4, "architectures": []}))
    assert "neither" in plait(ours, "--to", "yaml")[2]
    code, _, err = plait(source, "--to", "yaml", "--dtype", "bf16", "--optimizer")
    assert code == 2
    assert "--dtype" in err
    assert "--optimizer" in err
    assert plait("--to", "yaml")[0] == 2
    source.write_text(json.dumps({"train_batch_size": 4, "zero_optimisation": {"stage": 3}}))
    code, out, err = plait(source, "--to", "yaml")
    assert (code, out) == (2, "")
    assert "zero_optimization" in err


def test_a_section_that_both_have_is_told_by_what_is_in_it(plait: Any, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(json.dumps({"checkpoint": {"use_node_local_storage": True}}))
    code, out, _ = plait(path, "--to", "yaml")
    assert code == 0
    assert yaml.safe_load(out)["checkpoint"] == {"node_local": True}
    path.write_text(json.dumps({"checkpoint": {"node_local": True}}))
    code, _, err = plait(path, "--to", "yaml")
    assert code == 2
    assert not missing(err, "SRC", f"'{path}'")
