"""`strategy`: how training is spread over processes and memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PositiveFloat, Tag

from plait.config.base import Many, NonNegativeInt, PathText, PositiveInt, RefusedError, Section, Shorthand
from plait.config.engines import CustomEngine, EngineChoice, PluginWord, default_stage, engine_stage, read_config_file
from plait.config.part import BUILTIN_TAG, CUSTOM_TAG, CustomPart, mapping_or_custom, name_or_custom
from plait.config.text import choose, counted
from plait.errors import ConfigError, Problem

# `strategy.offload`: memory beyond the device.


Tier = Literal["none", "cpu", "nvme"]


class OffloadConfig(Shorthand):
    """What is kept in host memory or in files rather than on the device. A word is the tier of the optimizer."""

    optimizer: Tier = "none"
    """Where the fp32 weights and the optimizer states are kept."""
    update: Literal["auto", "cpu", "device"] = "auto"
    """What computes the update: the CPU, or the device, to which states are copied bucket by bucket. `auto`: a CUDA
    device whose link is faster than its share of the host's cores, or with 8-bit moments; not with `delayed` or
    `params`."""
    params: Tier = "none"
    """Where the weights of the forward and backward pass are kept between their uses; needs `zero: 3`."""
    activations: Literal["none", "all"] | Many[str] = "none"
    """Wrap units whose saved activations are kept in host memory until the backward pass: `all`, or patterns of
    names."""
    path: PathText | None = None
    """Folder of the `nvme` tier, best on a local disk. Absent: `offload` in `work_dir`."""
    budget_gib: PositiveFloat | None = None
    """With `optimizer: nvme`: host memory per rank for buckets in transfer. Absent: as much as `bucket_mb` needs."""
    bucket_mb: PositiveFloat = 256.0
    """Size of a bucket of fp32 weights that is updated at once; other buckets are copied meanwhile."""
    ratio: Annotated[float, Field(ge=0.0, lt=1.0)] | Literal["auto"] = 0.0
    """Share of the weights whose update stays on the device. `auto`: chosen by the plan, with `plait train`."""
    host_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """With `optimizer: nvme`: share of the weights whose states stay in host memory, beyond `budget_gib`."""
    delayed: bool = False
    """The update of a step runs during the next step, which still computes with the weights from before it."""
    prefetch_params: NonNegativeInt = 50_000_000
    """With `params`: prefetch the weights of the next units, up to this number of elements; the next unit always,
    unless this is 0."""
    live_params: PositiveInt = 1_000_000_000
    """With `params`: at most this number of elements in memory at one time, beyond the unit in use."""
    persistent_params: NonNegativeInt = 100_000
    """With `params`: weights of units with fewer elements than this stay in memory."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """A word is the tier of the optimizer."""
        return {"optimizer": value} if isinstance(value, str) else value

    @property
    def on(self) -> bool:
        """Whether anything is offloaded."""
        return self.optimizer != "none"

    @property
    def share(self) -> float:
        """`ratio` as a number; 0 for `auto`, whose value is not known here."""
        return 0.0 if self.ratio == "auto" else self.ratio

    @property
    def uses_files(self) -> bool:
        """Whether anything is kept in files."""
        return "nvme" in (self.optimizer, self.params)


ShardingWord = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]

SHORTHANDS: dict[str, dict[str, Any]] = {
    "auto": {"auto": True},
    "single": {"layout": {"dp_replicate": 1, "dp_shard": 1}},
    "ddp": {"zero": 0},
    "zero0": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "fsdp": {"sharding": "FULL_SHARD"},
    "hsdp": {"sharding": "HYBRID_SHARD"},
}

DATA_PARALLEL_ANSWER = (
    "nn.DataParallel drives all devices from one process: it copies the whole model to each of them every step, "
    "gathers outputs on the first one, and is limited by one Python interpreter"
)


class LayoutConfig(Section):
    """Sizes of the mesh axes; their product is the number of ranks.

    Of the two data-parallel axes, one that is absent takes the ranks that are left; any other is 1.
    """

    pp: PositiveInt = 1
    """Pipeline parallel size: the number of ranks over which the layers are split into stages."""
    dp_replicate: PositiveInt | None = None
    """Data parallel size, replicated: the number of copies of the model, each on its own samples."""
    dp_shard: PositiveInt | None = None
    """Data parallel size, sharded: the number of ranks that share one copy of the model, each on its own samples."""
    ep: PositiveInt = 1
    """Expert parallel size: the number of ranks, each on its own samples, that share the experts; other weights as the
    data-parallel axes say."""
    cp: PositiveInt = 1
    """Context parallel size: the number of ranks over which each sequence is split."""
    tp: PositiveInt = 1
    """Tensor parallel size: the number of ranks over which each layer is split."""


class CustomTensorPlan(CustomPart):
    """A custom tensor-parallel plan: called with the model, it returns patterns of modules → styles."""

    plugin_kind = "tensor_plan"


TensorPlan = Annotated[
    Annotated[dict[str, str], Tag(BUILTIN_TAG)] | Annotated[CustomTensorPlan, Tag(CUSTOM_TAG)],
    Discriminator(mapping_or_custom(CustomTensorPlan)),
]


class TensorConfig(Section):
    """How layers are split where `layout.tp` is more than 1."""

    sequence_parallel: bool = False
    """Between the split layers, activations are sharded along the sequence rather than replicated."""
    plan: TensorPlan = Field(default_factory=dict)
    """Patterns of module names and their styles (`layers.*.mlp.up: colwise`), or `package.module:name` of a function
    that returns them. Absent: the model's own plan."""
    async_tp: bool = False
    """Overlap collectives with matrix products; needs CUDA and `compile`."""


class CustomPipelineSchedule(CustomPart):
    """A custom schedule: called with `ranks` and `micro_batches`, it returns the actions of every rank in order."""

    plugin_kind = "pipeline_schedule"
    builtin = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zb", "zbv", "dualpipev")


ScheduleWord = Literal["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zb", "zbv", "dualpipev"]
ScheduleChoice = Annotated[
    Annotated[ScheduleWord, Tag(BUILTIN_TAG)] | Annotated[CustomPipelineSchedule, Tag(CUSTOM_TAG)],
    Discriminator(name_or_custom(CustomPipelineSchedule)),
]


class PipelineConfig(Section):
    """The stages and the schedule where `layout.pp` is more than 1."""

    schedule: ScheduleChoice = "1f1b"
    """The pipeline schedule; see parallelism.md. Or `package.module:name` of a custom one."""
    micro_batches: PositiveInt | None = None
    """Micro-batches per step; the same number as `batch.accumulation`."""
    stages_per_rank: PositiveInt | None = None
    """Absent: 1, or 2 where the schedule needs several."""
    split: Literal["parameters", "time"] | Many[str] = "parameters"
    """Balance stages by parameters or by measured time; or the names of the first layers of all stages but the
    first."""


class ContextConfig(Section):
    """How attention covers the whole sequence where `layout.cp` is more than 1."""

    kind: Literal["ring", "ulysses", "allgather"] = "ring"
    """`ring`: keys and values are sent around the ranks; `ulysses`: all-to-all between heads and tokens;
    `allgather`: keys and values are gathered."""


class WrapConfig(Section):
    """Which submodules are wrap units, which are sharded, recomputed and compiled as one. Absent: the model's
    blocks."""

    classes: Many[str] = ()
    """Class names, for example `LlamaDecoderLayer`."""
    names: Many[str] = ()
    """Patterns of module names, for example `layers.*`."""
    min_params: PositiveInt | None = None
    """Every module with at least this number of parameters, not counting those of units inside it."""


class CustomRecompute(CustomPart):
    """A custom policy: called with the name and the module of each unit, it returns what the unit recomputes."""

    plugin_kind = "recompute"
    builtin = ("none", "full", "every", "selective", "auto")


RecomputeMode = Annotated[
    Annotated[Literal["none", "full", "every", "selective", "auto"], Tag(BUILTIN_TAG)]
    | Annotated[CustomRecompute, Tag(CUSTOM_TAG)],
    Discriminator(name_or_custom(CustomRecompute)),
]


class RecomputeConfig(Shorthand):
    """Activation checkpointing: activations that are recomputed in the backward pass."""

    mode: RecomputeMode = "none"
    """Which blocks are recomputed. Or `package.module:name` of a custom policy."""
    every: PositiveInt = 2
    """With `every`: recompute every n-th block."""
    save_ops: Many[str] = ("mm", "addmm", "bmm", "scaled_dot_product_attention")
    """With `selective`: operations whose results are saved."""
    budget_gib: PositiveFloat | None = None
    """With `auto`: memory of one rank. Absent: 96 % of a GPU's free memory, 90 % of a host's."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """A word is the `mode`, and so is a policy that is given as an object."""
        return {"mode": value} if isinstance(value, str) or callable(value) else value


class TilesConfig(Section):
    """Sequence tiling: layers computed for some tokens at a time, which saves activations; see docs/offload.md."""

    names: Many[str] = ()
    """Patterns of modules that work on each token by itself, for example `blocks.*.ffn`."""
    tokens: PositiveInt = 4096
    """Tokens of each sequence per tile."""


class CompileConfig(Shorthand):
    """`torch.compile`."""

    enabled: bool = False
    scope: Literal["auto", "block", "model"] = "auto"
    """`auto`: the whole model where nothing is sharded and nothing is in fp8, each block otherwise."""
    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False

    @classmethod
    def expand(cls, value: Any) -> Any:
        """`true` and `false` are `enabled`; any option enables it."""
        if isinstance(value, bool):
            return {"enabled": value}
        if isinstance(value, dict) and value:
            return {"enabled": True, **value}
        return value


class StrategyConfig(Shorthand):
    """How training is distributed. A word (`ddp`, `zero3`, `fsdp`, …) is short for some of these keys."""

    auto: bool = False
    """`plait train` searches for the fastest strategy that fits, and trains with it."""
    engine: EngineChoice = "native"
    """`native`, or the real library of that name behind the same interface; see engines.md. Or a custom engine; see
    write-your-own.md."""
    config: dict[str, Any] | None = None
    """For `engine: deepspeed` a ds_config, the file or its keys; for `colossalai` the plugin's own options."""
    plugin: PluginWord | None = None
    """For `engine: colossalai`: its plugin."""
    zero: Annotated[int, Field(ge=0, le=3)] | None = None
    sharding: ShardingWord | None = None
    """FSDP's names for the same."""
    layout: LayoutConfig = Field(default_factory=LayoutConfig)
    tensor: TensorConfig = Field(default_factory=TensorConfig)
    """Options of tensor parallelism (`layout.tp`)."""
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    """Options of pipeline parallelism (`layout.pp`)."""
    context: ContextConfig = Field(default_factory=ContextConfig)
    """Options of context parallelism (`layout.cp`)."""
    wrap: WrapConfig = Field(default_factory=WrapConfig)
    reshard_after_forward: bool | PositiveInt | None = None
    """Absent: as the stage implies. A number reshards to groups of that many ranks."""
    forward_prefetch: NonNegativeInt = 0
    """Further wrap units whose all-gather is prefetched in the forward pass, beyond the next one."""
    backward_prefetch: NonNegativeInt = 0
    bucket_mb: PositiveFloat = 25.0
    """Size of a gradient bucket where parameters are replicated."""
    meta_init: bool = True
    """Build the model on the meta device, so that no rank ever holds all of it."""
    recompute: RecomputeConfig = Field(default_factory=RecomputeConfig)
    tiles: TilesConfig = Field(default_factory=TilesConfig)
    """Sequence tiling: layers that are computed for some tokens at a time."""
    compile: CompileConfig = Field(default_factory=CompileConfig)
    graphs: bool | Literal["auto"] = "auto"
    """Capture forward and backward pass as a CUDA graph and replay it: for models so small that Python is slower than
    the device. `auto`: Plait's GPT, Llama and ResNet, in one process, once the device is seen to wait. See gpu.md for
    the requirements on models."""
    kernels: Literal["auto", "plain"] = "auto"
    """Fused kernels for norms, gates and rotary embeddings. `auto`: on CUDA, where the model is not compiled."""
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """The attention kernel on CUDA. `auto`: the one that torch prefers; rows with document ids always use
    FlexAttention."""
    offload: OffloadConfig = Field(default_factory=OffloadConfig)
    """What is kept in host memory or in files. A word is the tier of the optimizer."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """A word is short for its keys in `SHORTHANDS`; a file in `config` is read."""
        if isinstance(value, dict):
            return read_config_file(value)
        if not isinstance(value, str):
            return value
        name = value.lower().replace("-", "").replace("_", "")
        if name in ("dp", "dataparallel", "nn.dataparallel"):
            raise RefusedError(DATA_PARALLEL_ANSWER, "Write 'ddp': the same maths, with one process per device.")
        if name in ("deepspeed", "colossalai"):
            raise RefusedError(f"{value!r} is an engine", f"Write `strategy: {{engine: {name}, zero: 2}}`.")
        if name not in SHORTHANDS:
            raise RefusedError(f"unknown strategy {value!r}", choose(value, SHORTHANDS, "word"))
        return SHORTHANDS[name]

    @property
    def engine_name(self) -> str:
        """The engine's name."""
        return str(self.engine.type) if isinstance(self.engine, CustomEngine) else self.engine

    @property
    def stage(self) -> int:
        """The ZeRO stage that `zero`, `sharding` or the engine's own configuration sets."""
        if self.engine != "native":
            configured = engine_stage(self.engine, self.plugin, self.config)
            return (
                configured if configured is not None else default_stage(self.plugin) if self.zero is None else self.zero
            )
        if self.sharding is not None:
            return {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "_HYBRID_SHARD_ZERO2": 2}.get(self.sharding, 3)
        return self.zero or 0


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of all mesh axes, outermost first; their product is the number of ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def data_parallel(self) -> int:
        """The number of ranks with different samples."""
        return self.dp_replicate * self.dp_shard * self.ep

    @property
    def replicas(self) -> int:
        """The number of ranks over which the gradient of a dense parameter is reduced."""
        return self.data_parallel * self.cp

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(asdict(self).values())

    def sizes(self) -> dict[str, int]:
        """Return axis → size, outermost first."""
        return asdict(self)


def min_ranks(strategy: StrategyConfig) -> int:
    """Return the smallest number of ranks of the layout: the product of the sizes that it fixes."""
    return prod(size or 1 for size in strategy.layout.model_dump().values())


def resolve_layout(strategy: StrategyConfig, *, size: int, local_size: int) -> Layout:
    """Return the layout with all axes, and refuse sizes whose product is not the number of ranks."""
    wanted = strategy.layout
    replicate, shard = wanted.dp_replicate, wanted.dp_shard
    others = {"pp": wanted.pp, "ep": wanted.ep, "cp": wanted.cp, "tp": wanted.tp}
    model = prod(others.values())
    left = max(size // model, 1)
    if strategy.stage == 0:
        shard = shard or 1
    elif replicate is None and shard is None:
        hybrid = strategy.sharding is not None and "HYBRID" in strategy.sharding
        # FSDP's hybrid sharding: shard within a host, replicate across hosts.
        shard = min(max(local_size // model, 1), left) if hybrid else left
    if replicate is None:
        assert shard is not None
        replicate = max(left // shard, 1)
    elif shard is None:
        shard = max(left // replicate, 1)
    layout = Layout(others["pp"], replicate, shard, others["ep"], others["cp"], others["tp"])
    if layout.size != size:
        axes = {axis: n for axis, n in layout.sizes().items() if n > 1 or axis.startswith("dp_")}
        ranks = "there is 1 rank" if size == 1 else f"there are {size} ranks"
        message = f"{' × '.join(axes)} = {' × '.join(map(str, axes.values()))} = {layout.size}, but {ranks}"
        start = f"Start {counted(layout.size, 'process', 'processes')}"
        remedy = f"{start}, or leave one of dp_replicate and dp_shard out: it takes the rest."
        if size % model:
            named = " × ".join(f"{axis} {n}" for axis, n in others.items() if n > 1)
            remedy = f"Start a multiple of {model} processes for {named}, for example {size // model * model or model}."
        raise ConfigError(Problem("strategy.layout", message, remedy))
    return layout
