"""Checkpoints with something wrong in them: each is refused by name, or gives the values that were saved."""

from __future__ import annotations

import json
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.multi.toys import fit
from tests.unit.checkpoint import samples
from tests.unit.checkpoint.test_deepspeed_read import save_stage_2, save_stage_3, values
from tests.unit.fuzz.mutate import bounded, damaged_json, draws, mutated, spoiled
from torch import Tensor

from plait.checkpoint import load_into, open_checkpoint
from plait.checkpoint.convert.detect import open_source
from plait.checkpoint.convert.summary import group_totals, summary_rows
from plait.checkpoint.load import verify
from plait.checkpoint.tensorfile import digest
from plait.config import parse
from plait.distributed import World, open_world
from plait.errors import CheckpointError, PlaitError

FILES = ("manifest.json", "index.json", "rank-00000.safetensors", "rank-00001.safetensors")


@pytest.fixture(scope="module")
def world() -> World:
    return open_world(parse({}).config)


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(5)
    return samples.two_ranks_tensors()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor]) -> Path:
    return samples.write_as_two_ranks(tmp_path_factory.mktemp("whole") / "step-00000007", tensors)


def differs(folder: Path, tensors: dict[str, Tensor], world: World) -> list[str]:
    """The tensors that are loaded with other values than were saved; damage that is found is an error."""
    found = {name: torch.full_like(tensor, 9.0) for name, tensor in tensors.items()}
    load_into(open_checkpoint(folder), found, world=world)
    with open_source(folder) as source:
        for name in source.entries:
            if not torch.equal(source.read(name), found[name]):
                return [name]
    return [name for name, tensor in tensors.items() if not torch.equal(found[name], tensor)]


def looked_into(path: Path) -> None:
    """What `plait convert --inspect --verify` does."""
    with open_source(path) as source:
        source.verify()
        assert all(len(row.name) > 0 for row in summary_rows(source.entries))
        group_totals(source.entries)


# ---- damage


def flip(folder: Path, random: Random) -> None:
    file = folder / random.choice(FILES)
    data = bytearray(file.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    file.write_bytes(data)


def spoil(folder: Path, random: Random) -> None:
    file = folder / random.choice(FILES)
    file.write_bytes(spoiled(file.read_bytes(), random))


def move(folder: Path, random: Random) -> None:
    first, second = random.sample(FILES, 2)
    match random.randrange(4):
        case 0:
            (folder / first).unlink()
        case 1:
            (folder / first).rename(folder / f"{first}.old")
        case 2:
            shutil.copyfile(folder / first, folder / second)
        case _:
            data = (folder / first).read_bytes()
            shutil.copyfile(folder / second, folder / first)
            (folder / second).write_bytes(data)


def forge(folder: Path, random: Random) -> None:
    """Another index or manifest, or another head of a file, under digests that are valid."""
    content: dict[str, Any] = json.loads((folder / "index.json").read_text())
    match random.randrange(4):
        case 0:
            changed = mutated(json.loads((folder / "manifest.json").read_text()), random)
            (folder / "manifest.json").write_text(json.dumps(changed))
            if isinstance(changed, dict) and isinstance(changed.get("files"), dict) and "digest" in changed:
                samples.reseal(folder, manifest=lambda _: None) if "index.json" in changed["files"] else None
        case 1:
            exchanged(content, random)
            samples.reseal(folder, text=json.dumps(content))
        case 2:
            file = folder / random.choice(FILES[2:])
            data = file.read_bytes()
            length = int.from_bytes(data[:8], "little")
            text = damaged_json(json.loads(data[8 : 8 + length]), random)
            head = len(text).to_bytes(8, "little") + text
            whole = head + data[8 + length :]
            file.write_bytes(whole)
            record = {"bytes": len(whole), "digest": digest(head)}
            samples.reseal(folder, manifest=lambda manifest: manifest["files"].update({file.name: record}))
        case _:
            samples.reseal(folder, text=damaged_json(content, random).decode(errors="replace"))


def exchanged(content: dict[str, Any], random: Random) -> None:
    """The same field of two pieces in each other's place: every value is one that occurs."""
    pieces = [piece for record in content["tensors"].values() for piece in record["pieces"]]
    first, second = random.sample(pieces, 2)
    for key in random.sample(sorted(first), random.randrange(1, 4)):
        first[key], second[key] = second[key], first[key]


DAMAGE: tuple[Callable[[Path, Random], None], ...] = (spoil, move, forge, forge, forge)


def test_no_damage_loads_other_values(
    request: pytest.FixtureRequest, tmp_path: Path, whole: Path, tensors: dict[str, Tensor], world: World
) -> None:
    seen: Counter[str] = Counter()
    refusals: list[str] = []
    for name, random in draws(request, "checkpoint", 60, 200):
        folder = tmp_path / name.replace(" ", "-") / whole.name
        shutil.copytree(whole, folder)
        damage = random.choice(DAMAGE)
        damage(folder, random)
        for read in (lambda: differs(folder, tensors, world), lambda: looked_into(folder)):  # noqa: B023
            try:
                with bounded():
                    assert not read()
            except PlaitError as error:
                refusals.append(str(error))
                seen["refused"] += 1
            except BaseException:
                print(f"{name}: {damage.__name__} {folder}")
                raise
            else:
                seen["equal"] += 1
        shutil.rmtree(folder.parent)
    assert seen["refused"] > seen["equal"] > 0
    assert all(whole.name in refusal for refusal in refusals), "messages name the place"
    "".join(refusals).encode()


def test_of_200_flipped_bits_none_loads_other_values(
    tmp_path: Path, whole: Path, tensors: dict[str, Tensor], world: World
) -> None:
    seen: Counter[str] = Counter()
    folder = tmp_path / whole.name
    for number in range(200):
        shutil.copytree(whole, folder)
        flip(folder, Random(f"flip {number}"))
        changed = [name for name in FILES if (folder / name).read_bytes() != (whole / name).read_bytes()]
        try:
            verify(open_checkpoint(folder))
            assert not differs(folder, tensors, world), changed
        except CheckpointError as error:
            seen["refused" if str(folder / changed[0]) in str(error) else f"{changed} not named"] += 1
        else:
            seen["equal"] += 1
        shutil.rmtree(folder)
    assert seen == {"refused": 200}, "every byte of a checkpoint is under a digest"


# ---- the state of a run that goes on


def test_a_forged_state_is_refused_or_gone_on_with(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    start = tmp_path / "whole"
    fit(0, 1, {"work_dir": start, "hooks": [{"type": "ema"}]}, stop_at=8)
    seen: Counter[str] = Counter()
    for name, random in draws(request, "resume", 24, 100):
        folder = tmp_path / "forged"
        shutil.copytree(start, folder, symlinks=True)
        (newest,) = (folder / "checkpoints").glob("step-*[0-9]")
        changed: dict[str, Any] = {}

        def forge_state(manifest: dict[str, Any], random: Random = random) -> None:
            changed.update(state=mutated(manifest["state"], random))  # noqa: B023
            manifest.update(changed)  # noqa: B023

        samples.reseal(newest, manifest=forge_state)
        try:
            with bounded():
                fit(0, 1, {"work_dir": folder, "checkpoint": {"resume": "auto"}, "hooks": [{"type": "ema"}]})
        except PlaitError as error:
            str(error).encode()
            seen["refused"] += 1
        except BaseException:
            print(f"{name}: {changed}")
            raise
        else:
            seen["resumed"] += 1
        shutil.rmtree(folder)
    assert min(seen["refused"], seen["resumed"]) > 0


# ---- checkpoints of others, which have no digests: whatever is in them, no traceback


def write_deepspeed(folder: Path, state: dict[str, Tensor]) -> Path:
    save_stage_2(folder, values(), 2)
    return folder


def write_deepspeed_3(folder: Path, state: dict[str, Tensor]) -> Path:
    save_stage_3(folder, values(), 2)
    return folder


def write_sharded_hf(folder: Path, state: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    model = sorted(samples.model_of(state).items())
    places = {}
    for number, part in enumerate((model[:2], model[2:]), start=1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file(dict(part), folder / name)
        places |= dict.fromkeys((key for key, _ in part), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(samples.DESCRIPTION))
    return folder


def write_file(path: Path, state: dict[str, Tensor]) -> Path:
    path.mkdir()
    samples.write_torch_file(path / "state.pt", state)
    return path


OTHERS: dict[str, Callable[[Path, dict[str, Tensor]], Path]] = {
    "hf": samples.write_hf,
    "sharded hf": write_sharded_hf,
    "torch": write_file,
    "fsdp": samples.write_fsdp,
    "deepspeed": write_deepspeed,
    "deepspeed 3": write_deepspeed_3,
}


@pytest.fixture
def _little_memory() -> Iterator[None]:
    """A pickle can ask for any amount of memory, which is then refused, and not taken from the other tests."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.usefixtures("_little_memory")
def test_no_checkpoint_of_others_ends_in_a_traceback(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    torch.manual_seed(6)
    state = samples.some_state()
    wholes = {kind: write(tmp_path / f"whole-{kind}", state) for kind, write in OTHERS.items()}
    for kind, folder in wholes.items():
        looked_into(folder / "state.pt" if kind == "torch" else folder)
    seen: Counter[str] = Counter()
    for name, random in draws(request, "others", 40, 150):
        kind = random.choice(sorted(wholes))
        folder = tmp_path / name.replace(" ", "-")
        shutil.copytree(wholes[kind], folder)
        file = random.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        as_json = file.suffix == ".json" and random.random() < 0.7
        data = file.read_bytes()
        file.write_bytes(damaged_json(json.loads(data), random) if as_json else spoiled(data, random))
        try:
            with bounded():
                looked_into(folder / "state.pt" if kind == "torch" else folder)
        except PlaitError as error:
            str(error).encode()
            seen["refused"] += 1
        except BaseException:
            print(f"{name}: {kind} {file.relative_to(folder)}")
            raise
        else:
            seen["read"] += 1
        shutil.rmtree(folder)
    assert seen["refused"] > 4
