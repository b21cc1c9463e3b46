"""The look at every host before the start: what is compared, and what is said about it."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import missing

from plait.launch import probe
from plait.launch.job import Job, Node
from plait.launch.options import parse_options
from plait.launch.preflight import Preflight, PreflightFinding, preflight
from plait.launch.prepare import code_folder
from plait.launch.probe import MARK, HostFacts, ProbeRequest, answer, code_hash

JOB = Job(("python", "t.py"), (Node("a", (0, 1)), Node("b", (0, 1))), address="127.0.0.1", port=29500)


@pytest.fixture(scope="module")
def here() -> HostFacts:
    """What this machine says of itself."""
    return answer(ProbeRequest(address="127.0.0.1"))


def look(facts: Sequence[HostFacts | str], *, job: Job = JOB, fixed_port: str | None = None) -> Preflight:
    """At hosts that answer with these facts, or fail with these words."""

    def reach(node: int, _: Sequence[str]) -> list[str]:
        given = facts[node]
        if isinstance(given, str):
            return [sys.executable, "-c", f"raise SystemExit({given!r})"]
        return [sys.executable, "-c", f"print('welcome'); print({MARK + json.dumps(asdict(given))!r})"]

    return preflight(job, reach, code=None, fixed_port=fixed_port)


def with_clock(facts: HostFacts, **changes: Any) -> HostFacts:
    return replace(facts, **{"interface": "eth0", "clock": time.time() + 0.05, "memory": 8 << 30, **changes})


def only(found: Preflight) -> PreflightFinding:
    (finding,) = found.findings
    return finding


def test_hosts_that_are_alike_may_start(here: HostFacts) -> None:
    found = look([with_clock(here), with_clock(here)])
    assert found.good
    assert found.findings == ()


def test_this_machine_answers(here: HostFacts) -> None:
    assert here.python == ".".join(map(str, sys.version_info[:3]))
    assert here.torch is not None
    assert here.interface is not None


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"torch": "1.0"}, ["torch", "1.0"]),
        ({"cuda": "99.9"}, ["cuda", "99.9"]),
        ({"plait": None}, ["plait"]),
        ({"code": "0123"}, ["code", "0123"]),
        ({"python": "3.9.1"}, ["python", "3.9"]),
    ],
)
def test_a_difference_is_an_error_that_names_the_host(
    here: HostFacts, changes: dict[str, Any], names: list[str]
) -> None:
    finding = only(look([with_clock(here), with_clock(here, **changes)]))
    assert (finding.host, finding.fatal) == ("b", True)
    assert not missing(finding.what, *names)


def test_another_patch_release_of_python_is_no_difference(here: HostFacts) -> None:
    other = here.python.rpartition(".")[0] + ".99"
    assert look([with_clock(here), with_clock(here, python=other)]).findings == ()


@pytest.mark.parametrize(
    ("changes", "names", "fatal"),
    [
        ({"memory": 1 << 30}, ["1024 MiB", "2 ranks"], False),
        ({"interface": None}, ["interface", "127.0.0.1"], True),
        ({"interface": "lo"}, ["loopback", "127.0.0.1"], True),
    ],
)
def test_what_a_host_lacks_is_said(here: HostFacts, changes: dict[str, Any], names: list[str], fatal: bool) -> None:
    finding = only(look([with_clock(here), with_clock(here, **changes)]))
    assert finding.host == "b"
    assert not missing(finding.what, *names)
    assert finding.fatal is fatal
    assert finding.remedy


@pytest.mark.parametrize(("off", "word"), [(-100, "behind"), (100, "ahead")])
def test_a_clock_is_wrong_by_what_cannot_have_passed_while_it_was_asked(here: HostFacts, off: int, word: str) -> None:
    began = time.time()
    finding = only(look([with_clock(here), with_clock(here, clock=began + off)]))
    took = time.time() - began
    said = re.search(rf"\b(\d+) s\b.*\b{word}\b", finding.what)
    assert said is not None, finding.what
    assert abs(int(said[1]) - 100) <= took + 0.5  # and the rounding
    assert (finding.host, finding.fatal) == ("b", False)
    assert finding.remedy


def test_slots_beyond_the_gpus_of_a_host_are_an_error(here: HostFacts) -> None:
    gpus = {"gpus": 2, "gpu_memory": 40 << 30}
    finding = only(look([with_clock(here, **gpus), with_clock(here, gpus=1, gpu_memory=40 << 30)]))
    assert not missing(finding.what, "slot 1", "1 GPU")
    finding = only(look([with_clock(here, **gpus), with_clock(here, gpus=2, gpu_memory=10 << 20)]))
    assert not missing(finding.what, "GPU", "10 MiB")


def test_a_port_in_use_is_replaced_unless_it_was_fixed(here: HostFacts) -> None:
    taken = with_clock(here, port_free=False, port_holder="process 7 (x)", other_port=31234)
    found = look([taken, with_clock(here)])
    assert found.good
    assert found.job.port == 31234
    found = look([taken, with_clock(here)], fixed_port="--master_port")
    assert found.job.port == 29500
    assert not missing(only(found).what, "--master_port 29500", "process 7 (x)")


def test_a_host_whose_address_only_it_knows_is_asked(here: HostFacts) -> None:
    nameless = replace(JOB, address="")
    found = look([with_clock(here, reached_at="10.1.2.3"), with_clock(here)], job=nameless)
    assert found.job.address == "10.1.2.3"
    found = look([with_clock(here, reached_at=None), with_clock(here)], job=nameless)
    assert "--master_addr" in only(found).remedy


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("ssh: connect to host b port 22: Connection refused", "--ssh_port"),
        ("root@b: Permission denied (publickey).", "ssh-copy-id"),
        ("No module named 'plait'", "Plait"),
        ("something else", "--no_ssh_check"),
    ],
)
def test_a_host_that_does_not_answer_comes_with_a_remedy(here: HostFacts, words: str, remedy: str) -> None:
    finding = only(look([with_clock(here), words]))
    assert (finding.host, finding.what) == ("b", words)
    assert remedy in finding.remedy


CHANGED = """@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
The fingerprint for the ED25519 key sent by the remote host is
SHA256:kDQO7tVCqOT9k/6zaDZIBec9+9wHoO48Cfi1Ovr2bFE.
Please contact your system administrator.
Add correct host key in /home/me/.ssh/known_hosts to get rid of this message.
Offending ED25519 key in /home/me/.ssh/known_hosts:3
  remove with:
  ssh-keygen -f "/home/me/.ssh/known_hosts" -R "b"
Host key for b has changed and you have requested strict checking.
Host key verification failed."""
SWITCHES_OFF = re.compile(r"keyscan|StrictHostKeyChecking|keygen[^`]*-R|--no_ssh_check|rm ")


def test_a_host_key_that_changed_may_be_an_attack(here: HostFacts) -> None:
    finding = only(look([with_clock(here), CHANGED]))
    for word in ("changed", "SHA256:kDQO7tVCqOT9k/6zaDZIBec9+9wHoO48Cfi1Ovr2bFE", "/home/me/.ssh/known_hosts:3"):
        assert word in finding.what
    for word in ("fingerprints", "/etc/ssh/ssh_host_ed25519_key.pub"):
        assert word in finding.remedy
    assert not SWITCHES_OFF.search(finding.remedy)


def test_a_host_key_that_is_not_known_is_compared_before_it_is_accepted(here: HostFacts) -> None:
    finding = only(look([with_clock(here), "Host key verification failed."]))
    assert "fingerprints" in finding.remedy
    assert not SWITCHES_OFF.search(finding.remedy)


def test_the_hash_of_code_is_that_of_its_python_files(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / ".venv").mkdir()
    source = tmp_path / "pkg" / "a.py"
    source.write_text("x = 1")
    before = code_hash(tmp_path)
    (tmp_path / ".venv" / "b.py").write_text(str(random.random()))
    (tmp_path / "notes.txt").write_text("y")
    assert code_hash(tmp_path) == before
    source.write_text("x = 2")
    assert code_hash(tmp_path) != before


def test_the_hash_of_code_is_of_the_settings_and_modules_too_that_arguments_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plait launch --no_python plait train run.yaml model.target=elsewhere:Model` runs none of it as a script."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(elsewhere)
    settings, module, other = here / "run.yaml", elsewhere / "own_model.py", elsewhere / "own_loss.py"
    settings.write_text("loss: own_loss:Loss")
    module.write_text("x = 1")
    other.write_text("y = 1")
    for words in (("train", "run.yaml", "model.target=own_model:Model"), ("--config=run.yaml", "--m=own_model:Model")):
        seen = {code_hash(here, words)}
        assert code_hash(here, words) in seen
        for number, file in enumerate((settings, module, other)):
            file.write_text(f"{file.read_text()}\n# {number} {words}")
            assert code_hash(here, words) not in seen
            seen.add(code_hash(here, words))
    settings.unlink()  # a host without the file
    assert code_hash(here, words) not in seen


def test_the_hash_of_code_is_of_plait_itself_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with other sources of Plait, and the same of the user's."""
    before = code_hash(tmp_path / "own")
    source = tmp_path / "plait" / "launch" / "probe.py"
    source.parent.mkdir(parents=True)
    source.write_text("x = 1")
    monkeypatch.setattr(probe, "__file__", str(source))
    other = code_hash(tmp_path / "own")
    source.write_text("x = 2")
    assert len({before, other, code_hash(tmp_path / "own")}) == 3


def test_a_program_that_is_no_script_is_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_folder(parse_options(["--no_python", "plait", "train", "run.yaml"])) == str(tmp_path)
    assert code_folder(parse_options(["--module", "plait", "train", "run.yaml"])) == str(tmp_path)


def test_hosts_are_asked_about_the_arguments_of_the_program(tmp_path: Path) -> None:
    job = replace(JOB, arguments=("train", "run.yaml"))
    note = tmp_path / "asked"

    def reach(node: int, _: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", f"import sys; open({str(note) + str(node)!r}, 'w').write(sys.stdin.readline())"]

    preflight(job, reach, code=str(tmp_path), fixed_port=False)
    asked = [ProbeRequest(**json.loads(Path(f"{note}{node}").read_text())) for node in range(2)]
    assert [tuple(each.words) for each in asked] == [job.arguments] * 2
    assert {each.code for each in asked} == {str(tmp_path)}
