"""DeepSpeed's engine on two ranks: checkpoints, pipelines, whole parameters, and its command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait.frontends.deepspeed as deepspeed
from plait.errors import CheckpointError, ModelError, TrainingError
from plait.frontends.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from plait.frontends.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.multi.deepspeed_loop import begin, conv_net, go_on, micro_step, pictures
from tests.multi.ranks import RankPool
from tests.refusals import missing, refused

ROOT = Path(__file__).parents[2]


def config(stage: int, *, ranks: int = 2, total: int = 16, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": total // 2 // ranks,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_min_lr": 1e-3}},
        **more,
    }


# ---- checkpoints


def save_and_go_on(rank: int, size: int, folder: str, job: dict[str, Any]) -> dict[str, Any]:
    engine = begin(deepspeed, job)
    go_on(engine, job, rank, size, 0, 3)
    engine.save_checkpoint(folder, client_state={"epoch": 2, "seen": torch.arange(3), "note": ("a", 1)})
    weights = engine.module_state_dict()
    engine.save_16bit_model(folder + "-16bit")
    return {"weights": weights, **go_on(engine, job, rank, size, 3, 3)}


def load_and_go_on(rank: int, size: int, folder: str, job: dict[str, Any]) -> dict[str, Any]:
    engine = begin(deepspeed, job)
    path, client = engine.load_checkpoint(folder)
    assert path is not None
    assert client is not None
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 6, 48)
    return {"client": client, **go_on(engine, job, rank, size, 3, 3)}


def test_a_checkpoint_goes_on_under_any_stage_and_number_of_ranks(two_ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    first = two_ranks.run(save_and_go_on, folder, {"config": config(2)})[0]
    assert (tmp_path / "saved" / "latest").read_text() == "global_step3"
    same = {name: pytest.approx(first[name], rel=2e-5) for name in ("losses", "norms")}
    for stage in (0, 1, 3):
        found = two_ranks.run(load_and_go_on, folder, {"config": config(stage)})[0]
        assert {name: found[name] for name in same} == same
        assert found["rates"] == first["rates"]
        assert found["client"]["epoch"] == 2
        assert found["client"]["note"] == ("a", 1)
        assert torch.equal(found["client"]["seen"], torch.arange(3))
    alone = load_alone(folder)
    assert {name: alone[name] for name in same} == same
    weights = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert weights.keys() == first["weights"].keys()
    assert all(torch.equal(weights[name], value) for name, value in first["weights"].items())
    whole = torch.load(tmp_path / "saved-16bit" / "pytorch_model.bin")
    assert all(torch.equal(whole[name], value) for name, value in weights.items())
    conv_net().load_state_dict(weights)


def save_where_nothing_can_be(rank: int, size: int, place: str) -> str:
    engine = begin(deepspeed, {"config": config(3)})
    with pytest.raises((OSError, TrainingError)) as caught:
        engine.save_16bit_model(place)
    return str(caught.value)


def test_a_model_that_cannot_be_written_fails_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    place = tmp_path / "a file"
    place.touch()
    assert all(str(place) in told for told in two_ranks.run(save_where_nothing_can_be, str(place)))


def load_alone(folder: str) -> dict[str, Any]:
    deepspeed.init_distributed()
    try:
        return load_and_go_on(0, 1, folder, {"config": config(0, ranks=1)})
    finally:
        deepspeed.comm.destroy_process_group()


def load_in_part(rank: int, size: int, folder: str) -> dict[str, Any]:
    job = {"config": config(3)}
    engine = begin(deepspeed, job)
    go_on(engine, job, rank, size, 0, 1)
    assert engine.load_checkpoint(folder + "-nowhere") == (None, None)
    engine.load_checkpoint(folder, tag="global_step3", load_module_only=True)
    counted = (engine.global_steps, engine.get_lr())
    weights = engine.module_state_dict()
    engine.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
    engine.save_checkpoint(folder, tag="mine", save_latest=False)
    return {"counted": counted, "weights": weights, "steps": engine.global_steps}


def test_weights_alone_are_loaded_where_that_is_asked(two_ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    first = two_ranks.run(save_and_go_on, folder, {"config": config(1)})[0]
    found = two_ranks.run(load_in_part, folder)[0]
    assert found["counted"][0] == 1
    assert found["steps"] == 3
    assert all(torch.equal(found["weights"][name], value) for name, value in first["weights"].items())
    assert (tmp_path / "saved" / "latest").read_text() == "global_step3"
    assert (tmp_path / "saved" / "mine" / "manifest.json").is_file()


def save_elsewhere(rank: int, size: int, folder: str, how: dict[str, Any]) -> tuple[list[float], list[float]]:
    job = {"config": config(2, **how)}
    engine = begin(deepspeed, job)
    go_on(engine, job, rank, size, 0, 2)
    engine.save_checkpoint(folder)
    first = go_on(engine, job, rank, size, 2, 2)["losses"]
    engine.destroy()
    again = begin(deepspeed, job)
    again.load_checkpoint(folder)
    return first, go_on(again, job, rank, size, 2, 2)["losses"]


@pytest.mark.parametrize("how", [{"use_node_local_storage": True}, {"writer": {"type": "Fast", "decoupled": True}}])
def test_checkpoints_on_each_node_and_in_the_background_go_on_too(
    two_ranks: RankPool, tmp_path: Path, how: dict[str, Any]
) -> None:
    for first, again in two_ranks.run(save_elsewhere, str(tmp_path), {"checkpoint": how}):
        assert first == again


def save_differently(rank: int, size: int, folder: str) -> str:
    engine = begin(deepspeed, {"config": config(0)})
    with refused(CheckpointError, "rank0", "rank1", "tags"):
        engine.save_checkpoint(folder, tag=f"rank{rank}")
    with refused(CheckpointError, "model", "state_dict"):
        engine.save_checkpoint(folder, client_state={"model": object()})
    return "told"


def test_what_cannot_be_saved_is_named(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(save_differently, str(tmp_path)) == ["told", "told"]


# ---- the loop


def by_hand(rank: int, size: int, stage: int) -> dict[str, Any]:
    """Boundaries set by the script, one step after all micro-batches; and no_sync."""
    engine = begin(deepspeed, {"config": config(stage)})
    losses = []
    for step in range(3):
        for micro in range(2):
            engine.set_gradient_accumulation_boundary(micro == 1)
            x, y = pictures(step * 2 + micro, 4 * size)
            loss = F.cross_entropy(engine(x.chunk(size)[rank]), y.chunk(size)[rank])
            if step == 1 and micro == 0:
                with engine.no_sync():
                    engine.backward(loss)
                    with refused(TrainingError, "no_sync"):
                        engine.step()
            else:
                engine.backward(loss)
            losses.append(float(loss.detach()))
        engine.step()
    with refused(TrainingError, "step", "backward"):
        engine.step()
    return {"norm": engine.get_global_grad_norm(), "steps": engine.global_steps, "weights": engine.module_state_dict()}


def counted(rank: int, size: int, stage: int) -> dict[str, Any]:
    engine = begin(deepspeed, {"config": config(stage)})
    for index in range(6):
        micro_step(engine, index, rank, size)
    return {"norm": engine.get_global_grad_norm(), "steps": engine.global_steps, "weights": engine.module_state_dict()}


@pytest.mark.parametrize("stage", [0, 2])
def test_boundaries_set_by_hand_give_the_same_steps(two_ranks: RankPool, stage: int) -> None:
    mine, theirs = two_ranks.run(by_hand, stage)[0], two_ranks.run(counted, stage)[0]
    assert mine["steps"] == theirs["steps"] == 3
    assert mine["norm"] == pytest.approx(theirs["norm"])
    assert all(torch.equal(mine["weights"][name], value) for name, value in theirs["weights"].items())


def look_between(rank: int, size: int, stage: int, looks: bool) -> list[float]:
    job = {"config": config(stage)}
    engine = begin(deepspeed, job)
    first: list[float] = go_on(engine, job, rank, size, 0, 1)["losses"]
    if looks:
        x, _ = pictures(99, 4)
        engine.eval()
        assert torch.equal(engine(x), engine.module(x))  # with a graph that nobody uses
        with torch.no_grad():
            engine(x)
        engine.train()
    return first + go_on(engine, job, rank, size, 1, 2)["losses"]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_look_at_the_model_between_steps_changes_nothing(two_ranks: RankPool, stage: int) -> None:
    assert two_ranks.run(look_between, stage, True) == two_ranks.run(look_between, stage, False)


def look_and_load(rank: int, size: int, stage: int, folder: str) -> list[bool]:
    """A model that is called past the engine, as `model.generate` does it, is saved and loaded all the same."""
    job, (x, _) = {"config": config(stage)}, pictures(99, 4)
    engine = begin(deepspeed, job)

    def look() -> Tensor:
        with torch.no_grad():
            return engine.module(x).clone()

    go_on(engine, job, rank, size, 0, 1)
    first = look()
    engine.save_checkpoint(folder, tag="first")
    go_on(engine, job, rank, size, 1, 1)
    second = look()
    engine.save_checkpoint(folder, tag="second")
    seen = [not torch.equal(first, second)]
    for tag, expected in (("first", first), ("second", second)):
        engine.load_checkpoint(folder, tag=tag)
        seen += [torch.equal(look(), expected)]
    return seen


@pytest.mark.parametrize("stage", [1, 2])
def test_a_look_past_the_engine_hides_nothing_from_a_checkpoint(
    two_ranks: RankPool, tmp_path: Path, stage: int
) -> None:
    assert two_ranks.run(look_and_load, stage, str(tmp_path)) == [[True] * 3] * 2


def gather(rank: int, size: int) -> dict[str, Any]:
    engine = begin(deepspeed, {"config": config(3)})
    head = engine.module.head
    part = head.weight
    with deepspeed.zero.GatheredParameters(head.weight):
        before = head.weight.detach().clone()
        with torch.no_grad():
            head.weight.zero_()
    with deepspeed.zero.GatheredParameters(list(head.parameters()), modifier_rank=1):
        kept = head.weight.detach().clone()
        if rank == 1:
            with torch.no_grad():
                head.weight.mul_(2)
    assert head.weight is part
    micro_step(engine, 0, rank, size)
    full = deepspeed.utils.safe_get_full_fp32_param(part)
    moments = deepspeed.utils.safe_get_full_optimizer_state(part, "exp_avg")
    return {"before": before, "kept": kept, "after": full.clone(), "moments": moments}


def test_whole_parameters_are_seen_and_changed(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(gather)
    expected = conv_net().head.weight
    assert torch.equal(first["before"], expected)
    assert torch.equal(first["kept"], expected)
    assert torch.equal(second["after"], 2 * expected)
    assert first["moments"] is None  # one of two micro-batches is no step


def save_as_scripts_do(rank: int, size: int, folder: str) -> dict[str, Any]:
    """What DeepSpeed-Chat and others do at the end of stage 3: parameter by parameter, with all ranks."""
    engine = begin(deepspeed, {"config": config(3)})
    for index in range(2):
        micro_step(engine, index, rank, size)
    if rank == 0:
        torch.save(engine.module.state_dict(), f"{folder}/alone.bin")
        with refused(ModelError, "engine.save_16bit_model", "GatheredParameters"):
            torch.save(list(engine.module.parameters()), f"{folder}/parts.bin")
    parts = list(engine.module.named_parameters())
    assert all(param.ds_status is ZeroParamStatus.NOT_AVAILABLE for _, param in parts)
    found: dict[str, Tensor] = {}
    for name, param in parts:
        with deepspeed.zero.GatheredParameters([param]), deepspeed.zero.GatheredParameters([param]):
            assert param.ds_status is ZeroParamStatus.AVAILABLE
            found[name] = param.data.cpu().clone()
    with deepspeed.zero.GatheredParameters([param for _, param in parts]):
        torch.save(engine.module.state_dict(), f"{folder}/whole-{rank}.bin")
    assert [param for _, param in parts] == list(engine.module.parameters())
    name, param = parts[0]
    with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
        if rank == 0:
            nn.init.ones_(param)
    with deepspeed.zero.GatheredParameters(param):
        assert bool((param == 1).all())
    return {"found": found, "whole": engine.module_state_dict(), "set": name}


def test_scripts_gather_parameters_and_save_them(two_ranks: RankPool, tmp_path: Path) -> None:
    first, _ = two_ranks.run(save_as_scripts_do, str(tmp_path))
    expected = {name: value for name, value in first["whole"].items() if name != first["set"]}
    inside = torch.load(tmp_path / "whole-0.bin")
    for name, value in expected.items():
        assert torch.equal(inside[name], value)
        assert name not in first["found"] or torch.equal(first["found"][name], value)
    assert first["found"].keys() == {name for name, _ in conv_net().named_parameters()}
    alone = torch.load(tmp_path / "alone.bin")
    assert all(alone[name].numel() == 0 for name in first["found"])  # nothing takes these for weights


# ---- pipelines


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def as_head(embedding: Embedding, x: Tensor) -> Tensor:
    return x @ embedding.table.weight.t()


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tied_layers() -> list[Any]:
    middle = [deepspeed.LayerSpec(nn.Linear, 8, 8), torch.tanh, deepspeed.LayerSpec(nn.Linear, 8, 8)]
    return [
        deepspeed.TiedLayerSpec("words", Embedding),
        *middle,
        deepspeed.TiedLayerSpec("words", Embedding, forward_fn=as_head),
    ]


def plain_layers() -> list[Any]:
    return [nn.Embedding(11, 8), nn.Linear(8, 8), torch.tanh, nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 11)]


class TokenLoss(nn.CrossEntropyLoss):
    """A loss that is a module, as most scripts have it."""

    def __init__(self) -> None:
        super().__init__(weight=torch.ones(11))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return super().forward(outputs.flatten(0, 1), labels.flatten())


def tokens(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(11, (4, 5), generator=generator), torch.randint(11, (4, 5), generator=generator)


def pipeline(rank: int, size: int, kind: str, stages: int, folder: str, method: str, zero: int = 0) -> dict[str, Any]:
    torch.manual_seed(3)
    layers = tied_layers() if kind == "tied" else plain_layers()
    loss_fn = token_loss if kind == "tied" else TokenLoss()
    net = deepspeed.PipelineModule(layers, num_stages=stages, loss_fn=loss_fn, partition_method=method)
    rows = size // stages
    settings = config(zero, ranks=rows, total=8)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings)
    assert isinstance(engine, deepspeed.PipelineEngine)
    assert engine.is_last_stage() == (rank // rows == stages - 1)
    data = (tuple(part.chunk(rows)[rank % rows] for part in tokens(index)) for index in range(100))
    losses = [float(engine.train_batch(data)) for _ in range(3)]
    evaluated = float(engine.eval_batch(data))
    engine.save_checkpoint(folder)
    return {"losses": losses, "evaluated": evaluated, "norm": engine.get_global_grad_norm(), "lr": engine.get_lr()}


@pytest.mark.parametrize(("kind", "method"), [("plain", "parameters"), ("plain", "type:linear"), ("tied", "uniform")])
def test_a_pipeline_of_two_ranks_is_one_process(two_ranks: RankPool, tmp_path: Path, kind: str, method: str) -> None:
    spread = two_ranks.run(pipeline, kind, 2, str(tmp_path / "two"), method)
    deepspeed.init_distributed()
    try:
        alone = pipeline(0, 1, kind, 1, str(tmp_path / "one"), method)
    finally:
        deepspeed.comm.destroy_process_group()
    for found in spread:
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-5)
        assert found["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert found["lr"] == alone["lr"]
    one, two = (get_fp32_state_dict_from_zero_checkpoint(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.allclose(two[name], value, atol=1e-6) for name, value in one.items())


def test_stages_of_a_pipeline_are_sharded_too(four_ranks: RankPool, tmp_path: Path) -> None:
    spread = four_ranks.run(pipeline, "tied", 2, str(tmp_path / "four"), "parameters", 2)
    deepspeed.init_distributed()
    try:
        alone = pipeline(0, 1, "tied", 1, str(tmp_path / "one"), "parameters")
    finally:
        deepspeed.comm.destroy_process_group()
    for found in spread:
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found["norm"] == pytest.approx(alone["norm"], rel=1e-5)


# ---- inference


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def tensor_plan(self) -> dict[str, str]:
        return {"up": "colwise", "down": "rowwise"}

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def answer(rank: int, size: int, x: Tensor) -> tuple[Tensor, Tensor, int]:
    torch.manual_seed(rank)  # rank 0's weights are taken
    model = Answering()
    expected = model(x).detach()
    engine = deepspeed.init_inference(model, dtype="fp32", tensor_parallel={"tp_size": size})
    return expected, engine(x).clone(), sum(p.to_local().numel() for p in model.up.parameters())  # type: ignore[operator]


def test_a_model_that_answers_is_spread_by_its_own_plan(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(answer, torch.randn(3, 6))
    assert torch.allclose(first[1], first[0], atol=1e-6)
    assert torch.allclose(second[1], first[0], atol=1e-6)
    assert first[2] == (6 * 8 + 8) // 2


# ---- the command line


@pytest.mark.parametrize(
    "words",
    [
        ["--deepspeed", "--deepspeed_config", "ds.json", "-s", "2"],
        ["-s", "2", "--deepspeed_config=ds.json", "--deepspeed"],
    ],
    ids=" ".join,
)
def test_a_script_runs_with_the_words_of_the_deepspeed_command(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**config(2), "steps_per_print": 1}) + "// as people write it\n")
    script = str(ROOT / "examples" / "deepspeed_script.py")
    command = [
        sys.executable,
        "-m",
        "plait",
        "launch",
        "--nproc_per_node",
        "2",
        script,
        *words,
        "--samples",
        "32",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step=2, skipped=0, lr=[" in done.stdout
    assert not missing(done.stdout, "ds.json", "native", "stage 2", "fp32", "2 ranks", "cpu")
