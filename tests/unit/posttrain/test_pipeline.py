"""Phases one after another: what a step begins with, what is checked first, and how a pipeline goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.refusals import missing, refused

from plait.checkpoint.convert.detect import open_source
from plait.config import to_yaml
from plait.errors import ConfigError
from plait.frontends.deepspeed.chat import read_steps, steps_of_flags, with_train_flags
from plait.posttrain.phases import (
    DESCRIPTION,
    PhaseState,
    PhaseStep,
    Wanted,
    from_files,
    make_steps,
    next_commands,
    outcome_of,
    phase_of,
    run_steps,
    state_of,
)
from plait.posttrain.run import phase_runner
from plait.trainer import Hook

MODEL = {"type": "gpt", "vocab_size": 12, "dim": 16, "layers": 1, "heads": 2, "seq_len": 24}
RUN: dict[str, Any] = {
    "device": "cpu",
    "model": MODEL,
    "posttrain": {"data": [{"type": "task", "samples": 100, "size": 1}], "val_fraction": 0.1},
    "plan": "off",
    "optim": {"lr": 1e-2},
    "batch": {"total": 8},
    "train": {"max_steps": 2},
    "log": {"console": "none"},
}


def describe(name: str, **changes: Any) -> str:
    """A run description in the current folder."""
    Path(name).write_text(yaml.safe_dump({**RUN, **changes}))
    return name


def checked(wanted: Wanted, ranks: int = 1) -> list[PhaseStep]:
    return make_steps(wanted, ranks=ranks, local_ranks=ranks)


def here(command: Sequence[str]) -> int:
    """Run a step in this process."""
    with phase_runner(command[0], command[1], command[2:]) as runner:
        runner.train()
    return 0


def never(command: Sequence[str]) -> int:
    raise AssertionError(f"{command} was started")


def problems(wanted: Wanted, ranks: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(wanted, ranks)
    return str(caught.value)


def weights(folder: str) -> dict[str, torch.Tensor]:
    with open_source(Path(folder)) as source:
        return {name: source.read(name).clone() for name in source.entries if name.startswith("model.")}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [describe(f"{phase}.yaml", work_dir=f"own/{phase}") for phase in ("sft", "reward", "dpo")]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[int]]:
    """A pipeline whose second step failed at first, and that was then run again; what was said, and its exit codes."""
    folder, before, said = tmp_path_factory.mktemp("done"), Path.cwd(), list[str]()
    os.chdir(folder)
    try:
        steps = checked(from_files([describe(f"{phase}.yaml") for phase in ("sft", "reward", "dpo")]))

        def fails_at_first(command: list[str]) -> int:
            return 7 if command[0] == "reward" else here(command)

        codes = [run_steps(steps, fails_at_first, said.append), run_steps(steps, here, said.append)]
    finally:
        os.chdir(before)
    return folder, said, codes


@pytest.fixture
def complete(done: tuple[Path, list[str], list[int]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(done[0])
    return [f"{phase}.yaml" for phase in ("sft", "reward", "dpo")]


def test_a_step_that_fails_ends_the_pipeline_which_goes_on_there(done: tuple[Path, list[str], list[int]]) -> None:
    _, said, codes = done
    assert codes == [7, 0]
    told = [line for line in said if "report.html" not in line]
    order = ("sft", "reward", "reward", "sft", "reward", "dpo")
    assert [phase for line, phase in zip(told, order, strict=True) if phase in line] == list(order)
    assert "7" in told[2]


def test_every_step_that_ran_has_its_page(complete: list[str]) -> None:
    for step in checked(from_files(complete)):
        page = (step.folder / "report.html").read_text()
        assert f"{step.number}. {step.phase}" in page
        assert ("data:image/svg+xml" in page) == (step.phase != "sft"), "pairs have the picture of calibration"


def test_each_step_begins_with_the_result_of_the_one_it_follows(complete: list[str]) -> None:
    steps = checked(from_files(complete))
    assert [[each.phase for each in step.after] for step in steps] == [[], ["sft"], ["sft"]]
    for step in steps[1:]:
        assert step.config.posttrain is not None
        assert step.config.posttrain.start == "runs/pipeline/sft"
    tuned = weights("runs/pipeline/sft")
    for folder in ("runs/pipeline/reward", "runs/pipeline/dpo"):
        learned = weights(folder)["model.blocks.0.attention.q.weight"] - tuned["model.blocks.0.attention.q.weight"]
        assert 0 < learned.abs().max() < 0.1, "two steps away from it"


def test_what_is_complete_is_not_run_again(complete: list[str]) -> None:
    said: list[str] = []
    assert run_steps(checked(from_files(complete)), never, said.append) == 0
    for line, phase in zip(said, ("sft", "reward", "dpo"), strict=True):
        assert not missing(line, phase, f"runs/pipeline/{phase}")


def test_the_table_has_figures_of_every_step_and_the_command_to_talk_to_the_last(complete: list[str]) -> None:
    steps = checked(from_files(complete))
    rows = [outcome_of(step) for step in steps]
    assert [row.state for row in rows] == [PhaseState.COMPLETE] * 3
    assert [row.figures.split(" ")[0] for row in rows] == ["loss", "accuracy", "accuracy"]
    talk, compare = next_commands(steps)
    assert talk == "plait chat --path runs/pipeline/dpo"
    assert "--against runs/pipeline/sft" in compare


def test_a_folder_with_other_settings_of_what_is_learned_is_not_taken(complete: list[str]) -> None:
    other = describe("other_sft.yaml", optim={"lr": 3e-3})
    assert not missing(problems(from_files([other])), "work_dir", "optim.lr", "0.01", "0.003")
    spread = describe("zero_sft.yaml", strategy="zero3", log={"every": 1})
    assert state_of(checked(from_files([spread]), ranks=2)[0]) is PhaseState.COMPLETE, "how it is spread may change"


def test_a_result_older_than_what_it_began_with_is_not_taken(files: list[str]) -> None:
    steps = checked(from_files(files[:2]))
    assert run_steps(steps, here, print) == 0
    Path("own/sft").rename("old")
    time.sleep(0.01)
    assert run_steps(checked(from_files(files[:1])), here, print) == 0
    assert not missing(problems(from_files(files[:2])), "work_dir", "'own/reward'", "'own/sft'")


def test_a_step_that_was_cut_short_goes_on_from_its_checkpoint(files: list[str]) -> None:
    describe(files[0], work_dir="own/sft", train={"max_steps": 4, "stop_after": 3})
    said: list[str] = []
    assert run_steps(checked(from_files(files[:1])), here, said.append) == 1
    assert not missing(said[-1], "sft", "step 3")
    describe(files[0], work_dir="own/sft", train={"max_steps": 4})
    (step,) = checked(from_files(files[:1]))
    assert state_of(step) is PhaseState.BEGUN
    said.clear()
    assert run_steps([step], here, said.append) == 0
    assert any("own/sft" in line for line in said)
    assert json.loads(Path("own/sft/report.json").read_text())["steps"] == 1, "the last of four"


class Interrupts(Hook):
    """Presses Ctrl-C after the first step."""

    def after_step(self, runner: Any, result: Any) -> None:
        if runner.step == 1:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_pipeline_that_a_signal_stops_ends_with_its_exit_code_and_goes_on(files: list[str]) -> None:
    def interrupted(command: Sequence[str]) -> int:
        with phase_runner(command[0], command[1], command[2:], hooks=[Interrupts()]) as runner:
            runner.train()
        return 130  # as the command does: saved, and not finished

    describe(files[0], work_dir="own/sft", train={"max_steps": 8})
    said: list[str] = []
    assert run_steps(checked(from_files(files[:1])), interrupted, said.append) == 130
    assert not missing(said[-1], "sft", "own/sft")
    assert run_steps(checked(from_files(files[:1])), here, said.append) == 0
    assert 1 <= json.loads(Path("own/sft/report.json").read_text())["steps"] < 8, "the rest of them"


def test_all_problems_of_all_steps_are_told_before_anything_starts(files: list[str]) -> None:
    describe(files[0], optimm={"lr": 1})
    describe(files[1], train={})
    describe(files[2], posttrain={"data": [{"type": "file", "path": "missing.jsonl"}]})
    told = problems(from_files(files))
    for word in ("step 1, sft.yaml", "optimm", "step 2, reward.yaml", "train", "step 3, dpo.yaml", "missing.jsonl"):
        assert word in told
    assert not Path("own").exists()


def test_models_that_do_not_fit_each_other_are_found_before_the_first_is_trained(files: list[str]) -> None:
    describe(files[2], model={**MODEL, "dim": 32})
    told = problems(from_files(files))
    assert not missing(told, "model", "step 3, dpo", "step 1, sft", "(12, 16)", "(12, 32)")


def test_a_judge_that_sees_less_than_the_policy_writes_is_found_at_once(files: list[str]) -> None:
    describe(files[1], model={**MODEL, "type": "llama", "seq_len": 8}, work_dir="own/reward")
    llama = {**MODEL, "type": "llama"}
    describe(files[0], model=llama, work_dir="own/sft")
    policy = describe("ppo.yaml", model=llama, ppo={"epochs": 1}, rollout={"prompts": 8})
    told = problems(from_files([*files[:2], policy]))
    assert not missing(told, "ppo.reward_model", "8 tokens", "24", "posttrain.max_len: 8")


BAD: list[tuple[Callable[[list[str]], object], int, str, list[str]]] = [
    (lambda files: describe(files[1], work_dir="own/sft"), 1, "work_dir", ["'own/sft'", "step 1, sft", "step 2"]),
    (lambda files: describe(files[0], checkpoint={"last": False}), 1, "posttrain.start", ["`checkpoint.last: false`"]),
    (
        lambda files: describe(files[0], lora={"rank": 2}, checkpoint={"trainable_only": True}),
        1,
        "posttrain.start",
        ["`checkpoint.trainable_only`", "`lora`"],
    ),
    (
        lambda files: [
            describe(files[0], lora={"also": ["*norm*"]}, checkpoint={"trainable_only": True}),
            *(describe(file, work_dir=f"own/{Path(file).stem}", lora={"rank": 8}) for file in files[1:]),
        ],
        1,
        "posttrain.start",
        ["`checkpoint.trainable_only`", "`lora.also`"],
    ),
    (lambda files: describe(files[0], strategy={"layout": {"tp": 2}}), 3, "strategy.layout", ["tp", "2", "3"]),
    (lambda files: describe(files[2], posttrain={"start": "nowhere"}), 1, "posttrain.start", ["'nowhere'"]),
    (lambda files: (Path("own").mkdir(), Path("own/sft").touch()), 1, "work_dir", ["'own/sft'", "step 1"]),
]


@pytest.mark.parametrize(("spoil", "ranks", "key", "names"), BAD, ids=[case[2] for case in BAD])
def test_what_cannot_work_is_refused_by_name(
    files: list[str], spoil: Callable[[list[str]], object], ranks: int, key: str, names: list[str]
) -> None:
    for file in files:
        describe(file, work_dir=f"own/{Path(file).stem}", batch={"total": 6})
    spoil(files)
    with refused(ConfigError, *names, key=key):
        checked(from_files(files), ranks)


def test_a_run_that_no_pipeline_started_is_left_alone(files: list[str]) -> None:
    here(["sft", files[0]])
    with refused(ConfigError, "'own/sft'", "--output-dir", key="work_dir"):
        checked(from_files(files))


def test_rows_that_lack_what_a_step_needs_are_found_before_it_starts(files: list[str]) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    data = {"data": [{"type": "file", "path": "rows.jsonl"}]}
    for file in files:
        describe(file, work_dir=f"own/{Path(file).stem}", posttrain=data, model={**MODEL, "vocab_size": 300})
    told = problems(from_files(files))
    assert not missing(told, "posttrain.data", "rows.jsonl, line 1", "'rejected'")
    assert "sft.yaml" not in told


def test_an_adapter_alone_is_passed_on_with_the_model_that_it_belongs_to(files: list[str]) -> None:
    here(["sft", describe("base.yaml", work_dir="base")])
    lora = {"lora": {"rank": 2}, "posttrain": {**RUN["posttrain"], "start": "base"}}
    describe(files[0], work_dir="own/sft", checkpoint={"trainable_only": True}, **lora)
    describe(files[2], work_dir="own/dpo", lora={"rank": 2})
    tuned, preferred = checked(from_files([files[0], files[2]]))
    assert preferred.config.posttrain is not None
    assert preferred.config.lora is not None
    assert (preferred.config.posttrain.start, preferred.config.lora.adapter) == ("base", "own/sft/adapter")
    assert run_steps([tuned, preferred], here, print) == 0


def test_a_step_that_trained_everything_beside_its_adapter_is_passed_on_whole(files: list[str]) -> None:
    describe(files[0], work_dir="own/sft", lora={"only": False}, checkpoint={"trainable_only": True})
    describe(files[2], work_dir="own/dpo", lora={"rank": 2})
    preferred = checked(from_files([files[0], files[2]]))[1].config
    assert preferred.posttrain is not None
    assert preferred.lora is not None
    assert (preferred.posttrain.start, preferred.lora.adapter) == ("own/sft", None)


def test_an_output_folder_moves_all_steps_and_what_they_name(files: list[str]) -> None:
    describe(files[1], work_dir="own/reward", posttrain={**RUN["posttrain"], "start": "own/sft"})
    words = ["--output-dir", "new"]
    steps = checked(with_train_flags(from_files(files), read_steps(words), ["output_dir"]))
    assert [str(step.folder) for step in steps] == ["new/sft", "new/reward", "new/dpo"]
    assert steps[1].config.posttrain is not None
    assert steps[1].config.posttrain.start == "new/sft"


def test_a_file_can_describe_all_steps(files: list[str]) -> None:
    described = {
        "output_dir": "all",
        "settings": {"seed": 5, "optim": {"lr": 2e-3}},
        "steps": [
            {"phase": "sft", "settings": {k: v for k, v in RUN.items() if k != "optim"}},
            {"phase": "dpo", "config": "dpo.yaml", "settings": {"dpo.beta": 0.3, "optim": {"lr": 1e-3}}},
        ],
    }
    Path("pipeline.yaml").write_text(yaml.safe_dump(described))
    tuned, preferred = checked(from_files(["pipeline.yaml"]))
    assert (tuned.config.seed, tuned.config.optim.lr, tuned.config.work_dir) == (5, 2e-3, "all/sft")
    assert preferred.config.dpo is not None
    assert (preferred.config.dpo.beta, preferred.config.optim.lr, preferred.config.work_dir) == (0.3, 1e-3, "own/dpo")
    Path("pipeline.yaml").write_text(yaml.safe_dump({"stepps": [], "steps": [{"phase": "sfd", "confg": 1}]}))
    with pytest.raises(ConfigError) as caught:
        from_files(["pipeline.yaml"])
    for wrong, meant in (("stepps", "`steps`"), ("sfd", "`sft`"), ("confg", "`config`")):
        assert any(wrong in str(each) and meant in str(each) for each in caught.value.problems)


def test_the_phase_of_a_description_is_what_it_says_or_is_called_or_has(files: list[str]) -> None:
    assert [phase_of(file) for file in files] == ["sft", "reward", "dpo"]
    assert phase_of(describe("a.yaml", phase="dpo")) == "dpo"
    assert phase_of(describe("b.yaml", grpo={"group": 4})) == "grpo"
    assert phase_of(describe("tiny-sft.yaml", sft={}, dpo={})) == "sft"
    with refused(ConfigError, "sft, dpo", "`phase:`", key="c.yaml"):
        phase_of(describe("c.yaml", sft={}, dpo={}))
    Path("pre.yaml").write_text(yaml.safe_dump({"data": {"type": "text", "path": "x"}}))
    assert phase_of("pre.yaml") == "train"


def test_steps_that_are_left_out_must_have_left_their_results(complete: list[str]) -> None:
    def asked(words: str, given: list[str]) -> list[PhaseStep]:
        return checked(with_train_flags(from_files(complete), read_steps(words.split()), given))

    assert [step.chosen for step in asked("--step 2 3", ["step"])] == [False, True, True]
    with refused(ConfigError, "step 1, sft", "'nowhere/sft'", "`--step`", key="posttrain.start"):
        asked("--step 2 --output-dir nowhere", ["step", "output_dir"])


def test_numbers_alone_are_the_three_steps_of_a_model_in_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    model.save_pretrained(tmp_path / "model")
    words = f"--actor-model {tmp_path / 'model'} --reward-zero-stage 2 --output-dir {tmp_path / 'out'}"
    steps = read_steps(words.split())
    wanted = with_train_flags(steps_of_flags(steps), steps, ["actor_model", "reward_zero_stage", "output_dir"])
    with refused(ConfigError, "step sft", "{type: task}", key="posttrain.data"):
        checked(wanted)
    given = [replace(each, settings=(*each.settings, 'posttrain.data=[{"type": "task"}]')) for each in wanted.steps]
    found = checked(replace(wanted, steps=tuple(given)))
    assert [step.phase for step in found] == ["sft", "reward", "ppo"]
    assert [step.config.strategy.stage for step in found] == [0, 2, 0]
    assert found[2].config.ppo is not None
    assert found[2].config.ppo.reward_model == str(tmp_path / "out" / "reward")
    with refused(ConfigError, key="--actor-model"):
        steps_of_flags(read_steps([]))


def test_a_pretrained_model_brings_its_tokenizer(files: list[str]) -> None:
    Path("corpus.txt").write_text("".join(f"{number} is a number, dbca= abcd\n" for number in range(300)))
    text = {"type": "text", "path": "corpus.txt", "vocab_size": 300, "seq_len": 16, "cache": "cache"}
    model = {**MODEL, "vocab_size": 300}
    first = {key: value for key, value in RUN.items() if key != "posttrain"} | {"model": model, "data": text}
    Path("train.yaml").write_text(yaml.safe_dump(first))
    describe(files[0], model=model, work_dir="own/sft")
    _, tuned = checked(from_files(["train.yaml", files[0]]))
    section = tuned.config.posttrain
    assert section is not None
    assert section.start == "runs/pipeline/train"
    assert section.tokenizer is not None
    assert Path(section.tokenizer).is_file()


def test_a_step_can_be_started_by_hand_from_what_is_written_down(complete: list[str]) -> None:
    for step in checked(from_files(complete)):
        assert (step.folder / DESCRIPTION).read_text() == to_yaml(step.config)
