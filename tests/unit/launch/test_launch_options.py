"""The flags of `plait launch`, and on which side of the script they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.refusals import missing, refused

from plait.errors import WorldError
from plait.launch.options import flags, misplaced_flag, parse_options, without

FIRST_FLAG = re.compile(r"plait launch (--?[A-Za-z][\w-]*)")
DEEPSPEED = [
    "-H",
    "--hostfile",
    "-i",
    "--include",
    "-e",
    "--exclude",
    "--num_nodes",
    "--min_elastic_nodes",
    "--max_elastic_nodes",
    "--num_gpus",
    "--num_accelerators",
    "--master_port",
    "--master_addr",
    "--launcher",
    "--launcher_args",
    "--module",
    "--no_python",
    "--no_local_rank",
    "--no_ssh_check",
    "--force_multi",
    "--save_pid",
    "--enable_each_rank_log",
    "--autotuning",
    "--elastic_training",
    "--bind_cores_to_rank",
    "--bind_core_list",
    "--ssh_port",
]
TORCHRUN = [
    "--nnodes",
    "--nproc_per_node",
    "--node_rank",
    "--rdzv_backend",
    "--rdzv_endpoint",
    "--rdzv_id",
    "--rdzv_conf",
    "--use_env",
]


def test_every_flag_of_deepspeed_and_of_torchruns_layout_is_known() -> None:
    known = {flag for action in flags()._actions for flag in action.option_strings}
    assert {*DEEPSPEED, *TORCHRUN} <= known


def test_every_flag_of_the_launcher_that_a_page_or_a_message_names_is_known() -> None:
    root = Path(__file__).parents[3]
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("src/**/*.py")]
    named = {(page.name, found) for page in pages for found in FIRST_FLAG.findall(page.read_text(encoding="utf-8"))}
    known = {flag.replace("_", "-") for action in flags()._actions for flag in action.option_strings}
    assert len(named) > 20
    assert [(page, flag) for page, flag in sorted(named) if flag.replace("_", "-") not in known] == []


def test_what_follows_the_script_is_kept_as_it_is() -> None:
    own = ["--lr", "1e-3", "--", "-H", "x", "--num_gpus=3", "a b", "--launcher", "nonsense"]
    options = parse_options(["--num_gpus", "2", "train.py", *own])
    assert (options.script, options.num_gpus, list(options.arguments)) == ("train.py", 2, own)


@pytest.mark.parametrize(
    "words",
    [
        ["--num-gpus", "2", "--hostfile=h", "t.py"],
        ["--num_gpus=2", "-H", "h", "t.py"],
        ["--num_accelerators", "2", "-Hh", "--", "t.py"],
    ],
)
def test_a_flag_may_be_spelt_in_several_ways(words: list[str]) -> None:
    options = parse_options(words)
    assert (options.num_gpus, options.hostfile, options.script, options.arguments) == (2, "h", "t.py", ())


def test_arguments_for_the_launcher_may_look_like_flags() -> None:
    assert parse_options(["--launcher_args", "--time=1 -p 'a b'", "t.py"]).launcher_args == ("--time=1", "-p", "a b")
    assert parse_options(["--launcher_args", "--oversubscribe", "t.py"]).launcher_args == ("--oversubscribe",)


def test_a_flag_of_the_script_before_it_is_explained() -> None:
    with refused(WorldError, "--deepspeed", "plait launch … train.py --deepspeed"):
        parse_options(["--num_gpus", "2", "--deepspeed", "ds.json", "train.py"])


def test_a_flag_of_the_launcher_after_the_script_is_noticed() -> None:
    note = misplaced_flag(parse_options(["train.py", "--lr", "1", "--num-gpus=2"]))
    assert note is not None
    assert not missing(note, "--num-gpus", "train.py")
    assert misplaced_flag(parse_options(["train.py", "--lr", "1", "--include", "x"])) is None


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--num_gpu", "2", "t.py"], ["--num_gpus"]),
        (["--num_gpus", "two", "t.py"], ["--num_gpus", "'two'"]),
        (["--num_gpus", "0", "t.py"], ["--num_gpus 0", "1"]),
        (["--launcher", "rsh", "t.py"], ["'rsh'", "ssh"]),
        (["--num_gpus", "2"], ["`plait launch [flags] script.py"]),
        (["--module", "--no_python", "t"], ["--module", "--no_python"]),
        (["--no_local_rank", "--pass_local_rank", "t"], ["--no_local_rank", "--pass_local_rank"]),
        (["--num_gpus", "2", "--nproc_per_node", "3", "t"], ["--num_gpus 2", "--nproc_per_node 3"]),
        (["--num_nodes", "2", "-i", "a", "t"], ["--num_nodes", "--include 'a'"]),
        (["--bind_core_list", "0-3", "t"], ["--bind_core_list", "--bind_cores_to_rank"]),
    ],
)
def test_what_is_wrong_is_said(words: list[str], names: list[str]) -> None:
    with refused(WorldError, *names):
        parse_options(words)


def test_a_launcher_is_chosen_in_any_case() -> None:
    assert parse_options(["--launcher", "OpenMPI", "t.py"]).launcher == "openmpi"


def test_flags_can_be_taken_out_of_a_command_line() -> None:
    words = ["--launcher", "slurm", "--launcher_args", "-p x", "--dry-run", "t.py", "--dry_run"]
    assert without(words, "launcher_args", "dry_run") == ["--launcher=slurm", "--", "t.py", "--dry_run"]
