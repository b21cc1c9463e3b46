"""Models and batches for pipelines, and one function that trains a pipeline as one process would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from plait.config.model import GptConfig, LlamaConfig
from plait.distributed.materialize import initialize
from plait.distributed.pipeline_parallel import Pipeline
from plait.distributed.pipeline_split import LayerStack, LazyLayer, TiedLazyLayer, make_stages, plan_stages
from plait.models import LossTerm
from plait.models.gpt import Gpt
from plait.models.llama import Llama
from tests.hf_models import batch, tiny_config, tiny_model
from tests.multi.ranks import RankPool

VOCAB, SEQ, STEPS = 31, 8, 3
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "dim": 16, "layers": 4, "heads": 4, "seq_len": SEQ}
HF_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ,
}


def llama(tied: bool = False, layers: int = 4) -> nn.Module:
    return Llama(LlamaConfig(type="llama", kv_heads=2, tie_embeddings=tied, **{**SIZES, "layers": layers}))


def gpt() -> nn.Module:
    return Gpt(GptConfig(type="gpt", dropout=0.0, **SIZES))


def hf(family: str, adapted: bool = True, layers: int = 4) -> nn.Module:
    import transformers

    from plait.config.model import HFConfig
    from plait.models.hf import build_hf_model

    sizes: dict[str, Any] = {**HF_SIZES, "num_hidden_layers": layers}
    if family == "gpt2":
        sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": layers, "n_head": 4, "n_positions": SEQ}
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}
        sizes |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    elif family == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = {"model_type": family, **sizes}
    if adapted:
        return build_hf_model(HFConfig(type="hf", config=config))
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    return model


def alexnet() -> nn.Module:
    """Convolutions, a flatten, a classifier: AlexNet in small, its dropout off."""
    features = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(48, 24), nn.ReLU(), nn.Dropout(0.0), nn.Linear(24, 5))
    parts = {"features": features, "flatten": nn.Flatten(), "classifier": classifier}
    model = nn.Sequential()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


class Pair(nn.Module):
    """Hands on a tuple in a dict, with something that is no tensor and something that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            given = {"pair": (given, given * 0.5), "mask": given[:, :1] > 0, "word": "kept"}
        left, right = given["pair"]
        assert given["word"] == "kept"
        left = self.left(left).tanh() * given["mask"]
        return {**given, "pair": (left + right, self.right(right).tanh())}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 5)

    def forward(self, given: Any) -> Tensor:
        out: Tensor = self.out(sum(given["pair"]))
        return out


def pairs() -> nn.Module:
    return nn.Sequential(Pair(), Pair(), Pair(), Join())


def unembed(embedding: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, embedding.weight)  # type: ignore[arg-type]


def layer_list() -> list[Any]:
    """Layers that are not built yet; the first, one in the middle and the last share a weight."""
    return [
        TiedLazyLayer("words", nn.Embedding, VOCAB, 12),
        LazyLayer(nn.Linear, 12, 12),
        torch.tanh,
        TiedLazyLayer("words", nn.Embedding, VOCAB, 12, forward=unembed),
        LazyLayer(nn.Linear, VOCAB, 12),
        LazyLayer(nn.LayerNorm, 12),
        TiedLazyLayer("words", nn.Embedding, VOCAB, 12, forward=unembed),
    ]


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama-8": lambda: llama(layers=8),
    "llama-tied": lambda: llama(tied=True),
    "gpt": gpt,
    "hf-llama": lambda: hf("llama"),
    "hf-gpt2": lambda: hf("gpt2"),
    "hf-mixtral": lambda: hf("mixtral"),
    "bare-gpt2": lambda: hf("gpt2", adapted=False),
    "hf-qwen3": lambda: hf("qwen3"),
    "alexnet": alexnet,
    "pairs": pairs,
    "layers": layer_list,
}


def build(name: str) -> Any:
    """A model by its name; `kind/model_type` is a tiny one of that architecture of transformers."""
    torch.manual_seed(5)
    if "/" in name:
        kind, _, model_type = name.partition("/")
        return tiny_model(model_type, kind)
    return MODELS[name]()


def nn_reset(module: Any) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def batches(name: str, count: int, rows: tuple[int, ...] = (2,)) -> list[list[Any]]:
    """For each step, micro-batches of the given numbers of rows, in turn."""
    generator = torch.Generator().manual_seed(0)
    if "/" in name:
        kind, _, model_type = name.partition("/")
        described = SimpleNamespace(config=tiny_config(model_type))
        return [[batch(described, kind, seed=step * count + i) for i in range(count)] for step in range(STEPS)]

    def micro_batch(size: int) -> Any:
        if name == "alexnet":
            images = torch.randn(size, 3, 8, 8, generator=generator)
            return images, torch.randint(0, 5, (size,), generator=generator)
        if name == "pairs":
            return torch.randn(size, 6, generator=generator), torch.randint(0, 5, (size,), generator=generator)
        ids = torch.randint(0, VOCAB, (size, SEQ + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
        return {"input_ids": ids[:, :-1], "labels": labels}

    return [[micro_batch(rows[i % len(rows)]) for i in range(count)] for _ in range(STEPS)]


def loss_of(answer: Any, inputs: Any, _index: int) -> Tensor:
    """A sum over targets, whatever the model answers with."""
    if isinstance(answer, LossTerm):
        return answer.sum
    if isinstance(getattr(answer, "loss", None), Tensor):
        mean: Tensor = answer.loss
        return mean
    logits = getattr(answer, "logits", answer)
    labels = inputs["labels"] if isinstance(inputs, dict) else inputs[1]
    if logits.ndim == 3:
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    return F.cross_entropy(logits.float(), labels, reduction="sum")


@dataclass
class Trace:
    """What training did, as whole tensors."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def optimizer_for(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.02, momentum=0.9, foreach=False)


@lru_cache
def train_alone(
    name: str, count: int, rows: tuple[int, ...] = (2,), steps: int = STEPS, dtype: torch.dtype = torch.float32
) -> Trace:
    """The same in one process, without any of what is tested."""
    model = build(name)
    if isinstance(model, list):
        model = LayerStack(model)
        initialize(model, nn_reset, seed=1, device=torch.device("cpu"))
    model = model.to(dtype)
    optimizer = optimizer_for(model.parameters())
    trace = Trace()
    for step in batches(name, count, rows)[:steps]:
        total = 0.0
        for inputs in step:
            if isinstance(model, nn.Sequential):
                answer = model(inputs[0].to(dtype))
            else:
                answer = model(inputs["input_ids"]) if isinstance(model, LayerStack) else model(**inputs)
            loss = loss_of(answer, inputs, 0)
            loss.backward()
            total += float(loss.detach())
        trace.losses.append(total)
        if not trace.gradients:
            trace.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return trace


@dataclass(frozen=True)
class Way:
    """How to train a pipeline."""

    schedule: str = "1f1b"
    rows: tuple[int, ...] = (2,)
    steps: int = STEPS
    virtual: int | None = None
    split: Any = "parameters"
    replicas: int = 1
    """Ranks that share each stage (`fully_shard`), with different micro-batches."""
    reshard: bool = False
    recompute: bool = False
    compiled: bool = False
    splits_backward: bool = True
    dtype: torch.dtype = torch.float32
    tensor_parallel: bool = False
    through_hooks: bool = False
    """Gradients are read by hooks on accumulation, as replicated training does."""


def train_pipeline(rank: int, size: int, name: str, count: int, way: Way) -> Trace:
    """Train; the trace has what this rank holds, and the losses where the last stage is."""
    ranks = size // way.replicas
    axis = "tp" if way.tensor_parallel else "dp"
    mesh = init_device_mesh("cpu", (ranks, way.replicas), mesh_dim_names=("pp", axis))
    group = mesh["pp"].get_group()
    plan = plan_stages(
        build(name),
        ranks=ranks,
        schedule=way.schedule,
        virtual=way.virtual,
        split=way.split,
        example=batches(name, count, way.rows)[0][0],
    )
    stages = make_stages(plan, dist.get_rank(group))
    collected: dict[str, Tensor] = {}
    for stage in stages:
        if name == "layers":
            initialize(stage.module, nn_reset, seed=1, device=torch.device("cpu"))
        stage.module.to(way.dtype)
        _apply(stage.module, way, mesh)
        if way.through_hooks:
            _collect(stage.module, collected)
    device = torch.device("cpu")
    pipeline = Pipeline(stages, schedule=way.schedule, group=group, device=device, splits_backward=way.splits_backward)
    named = [(stage, n, p) for stage in stages for n, p in stage.module.named_parameters()]
    optimizer = optimizer_for(p for _, _, p in named)
    trace = Trace()
    replica = 0 if way.tensor_parallel else mesh[axis].get_local_rank()
    for step in batches(name, count, way.rows)[: way.steps]:
        losses: list[float] = []

        def note(answer: Any, inputs: Any, index: int, losses: list[float] = losses) -> Tensor:
            loss = loss_of(answer, inputs, index)
            losses.append(float(loss.detach()))
            return loss

        mine = step if way.tensor_parallel else step[replica :: way.replicas]
        pipeline.step(_cast(mine, way.dtype), note)
        pipeline.tied.sum()
        trace.losses.append(sum(losses))
        if not trace.gradients:
            trace.gradients = {n: _whole(p.grad) for stage, n, p in named if stage.owns(n) and p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {n: _whole(p) for stage, n, p in named if stage.owns(n)}
    bubble = pipeline.bubble()
    trace.extra = {
        "bubble": bubble,
        "last": pipeline.has_last,
        "collected": collected,
        "copies": {n: _whole(p) for stage, n, p in named if not stage.owns(n)},
        "names": [(stage.index, n) for stage, n, _ in named],
    }
    return trace


def _apply(module: nn.Module, way: Way, mesh: Any) -> None:
    from plait.config.strategy import RecomputeConfig, WrapConfig
    from plait.distributed.activation_checkpointing import apply_recompute
    from plait.distributed.wrap import find_wrap_units

    units = find_wrap_units(module, WrapConfig())
    if way.tensor_parallel:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for unit in units:
            plan = {"ffn.up": ColwiseParallel(), "ffn.gate": ColwiseParallel(), "ffn.down": RowwiseParallel()}
            parallelize_module(unit.module, mesh["tp"], plan)
    if way.recompute:
        apply_recompute(units, RecomputeConfig(mode="full"))
    if way.compiled:
        for unit in units:
            unit.module.compile(backend="aot_eager")
    if way.replicas > 1 and not way.tensor_parallel:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        for unit in units:
            fully_shard(unit.module, mesh=mesh["dp"], reshard_after_forward=way.reshard)
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=way.reshard)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)


def _collect(module: nn.Module, collected: dict[str, Tensor]) -> None:
    for name, parameter in module.named_parameters():

        def collect(parameter: Tensor, name: str = name) -> None:
            assert parameter.grad is not None
            collected[name] = collected.get(name, torch.zeros(())) + parameter.grad.detach().clone()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(collect)


def _cast(step: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return [
        {k: cast(v) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(map(cast, inputs))
        for inputs in step
    ]


def _whole(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def assert_parity(pool: RankPool, name: str, count: int, way: Way, tolerance: float = 1e-5) -> list[Trace]:
    """Losses, first gradients and last weights of all ranks together are those of one process."""
    expected = train_alone(name, count, way.rows, way.steps, way.dtype)
    found: list[Trace] = pool.run(train_pipeline, name, count, way)
    losses = torch.zeros(len(expected.losses), dtype=torch.float64)
    seen_losses: set[tuple[float, ...]] = set()
    for trace in found:
        if trace.extra["last"] and tuple(trace.losses) not in seen_losses:
            seen_losses.add(tuple(trace.losses))
            losses += torch.tensor(trace.losses, dtype=torch.float64)
    assert_near("loss", losses, torch.tensor(expected.losses, dtype=torch.float64), tolerance)
    for what in ("gradients", "weights"):
        wanted: dict[str, Tensor] = getattr(expected, what)
        together: dict[str, Tensor] = {}
        for trace in found:
            together.update(getattr(trace, what))
        assert together.keys() == wanted.keys(), together.keys() ^ wanted.keys()
        for key, tensor in wanted.items():
            assert_near(f"{what} {key}", together[key], tensor, tolerance)
    for trace in found:
        for key, copy in trace.extra["copies"].items():
            assert_near(f"copy of {key}", copy, expected.weights[key], tolerance)
    return found


def assert_near(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape, what
    scale = max(float(expected.abs().max()), 1e-3)
    difference = float((found.double() - expected.double()).abs().max())
    assert difference <= tolerance * scale, f"{what} differs by {difference:.2e} of {scale:.2e}"
