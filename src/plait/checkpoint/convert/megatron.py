"""Megatron checkpoints, opened under the tensor names of the `transformers` model that computes the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.checkpoint.convert.dcp import Chunks
from plait.checkpoint.convert.files import Inert, PickledTensor, field, open_file
from plait.checkpoint.convert.source import Recipe, Source, TensorEntry, View, first_rows
from plait.config import read_json_object, read_name
from plait.errors import CheckpointError

# The folders of a Megatron checkpoint: one of all iterations, one for each iteration, and the files in it.


TRACKER = "latest_checkpointed_iteration.txt"
"""The file that names the newest iteration of a folder."""
BACKEND = "metadata.json"
"""The file that names the format of an iteration's distributed files."""
RANK_FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d+)((?:_\d+)*)")

Coordinates = tuple[int, ...]
"""A rank's coordinates, as in its folder's name: tensor, then pipeline and expert if their size is above 1."""


def is_megatron(path: Path) -> bool:
    """Whether a folder looks like a Megatron checkpoint, or a folder of several."""
    return (path / TRACKER).is_file() or _is_distributed(path) or bool(rank_files(path))


def iteration(path: Path) -> Path:
    """Return the folder of one iteration: the path itself, or the newest iteration in it."""
    if not (path / TRACKER).is_file():
        return path
    named = read_name(path / TRACKER, CheckpointError)
    folder = path / (f"iter_{int(named):07d}" if named.isdigit() else named)
    if not folder.is_dir():
        raise CheckpointError(f"{path / TRACKER} names {named}, but {folder.name} is missing beside it; copy it too")
    return folder


def rank_files(path: Path) -> dict[Coordinates, Path]:
    """Return the files of all ranks, where each rank wrote its own."""
    files = {}
    for folder in path.glob("mp_rank_*"):
        named = _RANK.fullmatch(folder.name)
        if named is not None and (folder / RANK_FILE).is_file():
            files[(int(named[1]), *(int(number) for number in named[2].split("_")[1:]))] = folder / RANK_FILE
    return files


def check_backend(path: Path) -> None:
    """Raise an error unless the distributed files have torch's format."""
    backend = _backend(path)
    if backend != "torch_dist":
        raise CheckpointError(
            f"{path} is in Megatron's format {backend!r}, and torch_dist and torch can be read; "
            "load it with Megatron-LM, and save it with --ckpt-format torch_dist"
        )


def _is_distributed(path: Path) -> bool:
    return (path / BACKEND).is_file() and _backend(path) is not None


def _backend(path: Path) -> str | None:
    try:
        named = read_json_object(path / BACKEND, CheckpointError).get("sharded_backend")
    except CheckpointError:
        return None
    return named if isinstance(named, str) else None


# Common to both formats of Megatron: unsharded tensors under Megatron's names, with layers numbered over all stages.


LAYER = r"decoder\.layers\.(\d+)\."
"""A pattern for the prefix of the names in a layer."""
IGNORED = r"_extra_state|\.core_attention\."
"""A pattern for buffers of Transformer Engine, which are not part of the model."""


class MegatronWeights(Source):
    """The weights of a checkpoint: `model.<name>`, where the names are those of Megatron Core."""

    kind = "megatron"

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, TensorEntry],
        read: Callable[[str], Tensor],
        args: Arguments,
        facts: Mapping[str, str],
    ) -> None:
        self.path = path
        self.entries = {f"model.{name}": entry for name, entry in entries.items()}
        self.args = args
        self.tied = not args("untie_embeddings_and_output_weights", False)
        """Whether the head is tied to the embedding. The last pipeline stage then has a copy of it."""
        self.facts = {"written by": "Megatron", **facts, "left out": "the optimizer's state"}
        self.state = {}
        self._read = read

    def read(self, name: str) -> Tensor:
        """Return one whole tensor."""
        return self._read(name.removeprefix("model."))

    def close(self) -> None:
        """Do nothing: no file is open between two reads."""


class Arguments:
    """The training arguments (`args`) that Megatron saves in a checkpoint."""

    def __init__(self, saved: Any, path: Path) -> None:
        if not isinstance(saved, Inert):
            raise CheckpointError(
                f"{path} does not hold the training arguments (`args`), which are needed for the number of attention "
                "heads; save it with Megatron-LM, whose checkpoints do"
            )
        self._saved, self._path = saved, path

    def __call__(self, name: str, default: Any = None) -> Any:
        """Return an argument; `default` if it is absent or None."""
        value = field(self._saved, name)
        return default if value is None else value

    def count(self, name: str) -> int:
        """Return an argument that must be an integer."""
        value = self(name)
        if not isinstance(value, int):
            raise CheckpointError(f"{self._path}: its arguments have no integer {name}, which is needed to read it")
        return value


# Recipes that make the tensors of a `transformers` model from Megatron's: the code common to all families.


class HFDescription(NamedTuple):
    """The `transformers` model of a Megatron checkpoint, and how its tensors are computed."""

    config: dict[str, Any]
    """The content of its `config.json`."""
    recipes: Mapping[str, Recipe]
    """The recipe of each of its tensors, `model.<name>`."""


class AttentionHeads(NamedTuple):
    """Counts of attention heads. Megatron stores queries, keys and values in one matrix, query group by group."""

    queries: int
    groups: int
    size: int

    def select(self, which: int) -> Callable[[Tensor], Tensor]:
        """Return a function that extracts queries (0), keys (1) or values (2) from that matrix, or from its bias."""
        per_group = self.queries // self.groups
        rows = [slice(0, per_group), slice(per_group, per_group + 1), slice(per_group + 1, per_group + 2)][which]

        def take(joined: Tensor) -> Tensor:
            grouped = joined.reshape(self.groups, per_group + 2, self.size, *joined.shape[1:])
            return grouped[:, rows].flatten(0, 2)

        return take


def heads_of(source: MegatronWeights) -> AttentionHeads:
    """Return the attention heads from the training arguments."""
    args = source.args
    count = args.count("num_attention_heads")
    groups = args.count("num_query_groups") if args("group_query_attention", False) else count
    return AttentionHeads(count, groups, args("kv_channels", args.count("hidden_size") // count))


class Recipes:
    """Collects the recipes of a `transformers` model. Its methods take all names that a stored tensor may have."""

    def __init__(self, source: MegatronWeights) -> None:
        self._source = source
        self.all: dict[str, Recipe] = {}

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name."""
        return f"model.{name}" in self._source.entries

    def shape(self, *names: str) -> tuple[int, ...]:
        """Return the shape of the tensor with the first of these names that exists."""
        return tuple(self._source.entries[f"model.{self._stored_name(names)}"].shape)

    def make(self, target: str, *names: str, by: Callable[[Tensor], Tensor] | None = None) -> None:
        """Add a recipe for the tensor `target`: `by` of the stored tensor with the first of `names` that exists."""
        self.all[f"model.{target}"] = (f"model.{self._stored_name(names)}",), by or (lambda tensor: tensor)

    def _stored_name(self, names: tuple[str, ...]) -> str:
        for name in names:
            if self.has(name):
                return name
        raise CheckpointError(f"{self._source.path} lacks {names[0]}; is it the whole model?")


def layers_of(source: MegatronWeights) -> Iterator[tuple[int, str]]:
    """Return the number of each layer, and the prefix of its names."""
    return ((layer, f"decoder.layers.{layer}.") for layer in range(source.args.count("num_layers")))


def refuse(source: MegatronWeights, expected: Mapping[str, Any]) -> None:
    """Raise an error if a training argument differs from its only supported value in `expected`."""
    for name, value in expected.items():
        actual = source.args(name, value)
        if actual != value:
            raise CheckpointError(f"{source.path} was trained with {name} {actual!r}; only {value!r} is supported")


# The format `torch_dist`: files of `torch.distributed.checkpoint`, in which layers and experts are stacked.


COMMON = "common.pt"
"""The file with everything other than tensors that is the same on all ranks."""
_STACK = re.compile(r"decoder\.layers\.(?!\d)")
_EXPERTS = ".mlp.experts.experts."
_NOT_MODEL = re.compile(rf"^(?:optimizer|rng_state|rerun_state_machine|chained_\d+)\b|{IGNORED}")

StackIndex = tuple[str, tuple[int, ...]]
"""The name of a stored tensor, and the index of one layer and expert in its first dimensions."""


def read_distributed(path: Path) -> MegatronWeights:
    """Return the weights of an iteration; stacked tensors are split, so each layer and expert has its own."""
    chunks = Chunks(path)
    common = open_file(path / COMMON)
    locations: dict[str, StackIndex] = {}
    for stored, entry in chunks.tensors.items():
        if not _NOT_MODEL.search(stored):
            locations |= _unstacked(stored, entry)
    entries = {
        name: TensorEntry(chunks.tensors[stored].shape[len(index) :], chunks.tensors[stored].dtype)
        for name, (stored, index) in locations.items()
    }
    facts = {"format": "torch_dist", "step": str(common.get("iteration", "unknown")), "files": str(chunks.files)}
    args = Arguments(common.get("args"), path / COMMON)
    return MegatronWeights(path, entries, lambda name: chunks.read(*locations[name]), args, facts)


def _unstacked(stored: str, entry: TensorEntry) -> dict[str, StackIndex]:
    """Return the tensors of layers and experts that a stored tensor stacks: name → its place there."""
    if _STACK.match(stored):
        rest = stored.removeprefix("decoder.layers.")
        layers: list[StackIndex] = [(f"decoder.layers.{layer}.{rest}", (layer,)) for layer in range(entry.shape[0])]
    else:
        layers = [(stored, ())]
    tensors: dict[str, StackIndex] = {}
    for name, index in layers:
        if _EXPERTS not in name:
            tensors[name] = stored, index
            continue
        before, after = name.split(_EXPERTS)
        for expert in range(entry.shape[len(index)]):
            tensors[f"{before}.mlp.experts.local_experts.{expert}.{after}"] = stored, (*index, expert)
    return tensors


# Megatron's original GPT (learned positions, LayerNorm, biases) as GPT-2.


_GPT2_SETTINGS = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "squared_relu": False,
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
}


def as_gpt2(source: MegatronWeights) -> HFDescription:
    """Return the model as GPT-2 of `transformers`, which stores its matrices transposed."""
    refuse(source, _GPT2_SETTINGS)
    recipes, heads = Recipes(source), heads_of(source)
    if heads.groups != heads.queries:
        raise CheckpointError(
            f"{source.path} has learned positions and grouped queries, which no model of transformers supports"
        )
    recipes.make("transformer.wte.weight", "embedding.word_embeddings.weight")
    recipes.make("transformer.wpe.weight", "embedding.position_embeddings.weight")
    if not source.tied:
        recipes.make("lm_head.weight", "output_layer.weight")
    for suffix in ("weight", "bias"):
        recipes.make(f"transformer.ln_f.{suffix}", f"decoder.final_layernorm.{suffix}")
        for layer, theirs in layers_of(source):
            _layer(recipes, f"transformer.h.{layer}.", theirs, suffix, heads)
    args = source.args
    vocab_size, width = recipes.shape("embedding.word_embeddings.weight")
    config = {
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": recipes.shape("embedding.position_embeddings.weight")[0],
        "n_embd": width,
        "n_layer": args.count("num_layers"),
        "n_head": heads.queries,
        "n_inner": recipes.shape("decoder.layers.0.mlp.linear_fc2.weight")[1],
        # Megatron's default, the fused kernel, is the tanh approximation.
        "activation_function": "gelu_new" if args("openai_gelu", False) or args("bias_gelu_fusion", True) else "gelu",
        "layer_norm_epsilon": float(args("norm_epsilon", 1e-5)),
        "tie_word_embeddings": source.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return HFDescription(config, recipes.all)


def _layer(recipes: Recipes, ours: str, theirs: str, suffix: str, heads: AttentionHeads) -> None:
    turn = torch.t if suffix == "weight" else None

    def sorted_heads(joined: Tensor) -> Tensor:
        source = torch.cat([heads.select(which)(joined) for which in range(3)])
        return source if turn is None else turn(source)

    norms = {
        "ln_1": (f"self_attention.linear_qkv.layer_norm_{suffix}", f"input_layernorm.{suffix}"),
        "ln_2": (f"mlp.linear_fc1.layer_norm_{suffix}", f"pre_mlp_layernorm.{suffix}"),
    }
    for target, names in norms.items():
        recipes.make(f"{ours}{target}.{suffix}", *(theirs + name for name in names))
    recipes.make(f"{ours}attn.c_attn.{suffix}", f"{theirs}self_attention.linear_qkv.{suffix}", by=sorted_heads)
    recipes.make(f"{ours}attn.c_proj.{suffix}", f"{theirs}self_attention.linear_proj.{suffix}", by=turn)
    recipes.make(f"{ours}mlp.c_fc.{suffix}", f"{theirs}mlp.linear_fc1.{suffix}", by=turn)
    recipes.make(f"{ours}mlp.c_proj.{suffix}", f"{theirs}mlp.linear_fc2.{suffix}", by=turn)


# Models with RoPE, RMSNorm and SwiGLU as Llama, Qwen2, Qwen3, Mixtral or Qwen3-MoE.


_LLAMA_SETTINGS = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
    "multi_latent_attention": False,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
}
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The settings of Megatron's `--use-rope-scaling` other than its factor."""


def as_llama(source: MegatronWeights) -> HFDescription:
    """Return the model as one of these families of `transformers`; the names of its tensors decide which."""
    refuse(source, _LLAMA_SETTINGS)
    recipes, heads = Recipes(source), heads_of(source)
    recipes.make("model.embed_tokens.weight", "embedding.word_embeddings.weight")
    recipes.make("model.norm.weight", "decoder.final_layernorm.weight")
    if not source.tied:
        recipes.make("lm_head.weight", "output_layer.weight")
    experts, model_type = _experts(recipes), _model_type(recipes)
    for layer, theirs in layers_of(source):
        ours = f"model.layers.{layer}."
        _attention(recipes, ours, theirs, heads)
        if model_type == "mixtral":
            _mixture(recipes, f"{ours}block_sparse_moe.", theirs, ("w1", "w3", "w2"), experts)
        elif model_type == "qwen3_moe":
            _mixture(recipes, f"{ours}mlp.", theirs, ("gate_proj", "up_proj", "down_proj"), experts)
        else:
            _gated(recipes, f"{ours}mlp.", f"{theirs}mlp.", ("gate_proj", "up_proj", "down_proj"))
    return HFDescription(_config(source, recipes, heads, model_type, experts), recipes.all)


def _model_type(recipes: Recipes) -> str:
    """Return the `model_type` of `transformers`."""
    normed = recipes.has("decoder.layers.0.self_attention.q_layernorm.weight")
    if recipes.has("decoder.layers.0.mlp.router.weight"):
        return "qwen3_moe" if normed else "mixtral"
    if normed:
        return "qwen3"
    return "qwen2" if recipes.has("decoder.layers.0.self_attention.linear_qkv.bias") else "llama"


def _experts(recipes: Recipes) -> int:
    router = "decoder.layers.0.mlp.router.weight"
    return recipes.shape(router)[0] if recipes.has(router) else 0


def _attention(recipes: Recipes, ours: str, theirs: str, heads: AttentionHeads) -> None:
    # Transformer Engine fuses a norm with the linear layer after it, and keeps the norm's weight there.
    inside = f"{theirs}self_attention."
    recipes.make(
        f"{ours}input_layernorm.weight", f"{inside}linear_qkv.layer_norm_weight", f"{theirs}input_layernorm.weight"
    )
    for which, projection in enumerate("qkv"):
        for suffix in ("weight", "bias"):
            if suffix == "weight" or recipes.has(f"{inside}linear_qkv.bias"):
                target = f"{ours}self_attn.{projection}_proj.{suffix}"
                recipes.make(target, f"{inside}linear_qkv.{suffix}", by=heads.select(which))
    recipes.make(f"{ours}self_attn.o_proj.weight", f"{inside}linear_proj.weight")
    for projection in "qk":
        if recipes.has(f"{inside}{projection}_layernorm.weight"):
            recipes.make(f"{ours}self_attn.{projection}_norm.weight", f"{inside}{projection}_layernorm.weight")
    recipes.make(
        f"{ours}post_attention_layernorm.weight",
        f"{theirs}mlp.linear_fc1.layer_norm_weight",
        f"{theirs}pre_mlp_layernorm.weight",
    )


def _gated(recipes: Recipes, ours: str, theirs: str, names: tuple[str, str, str]) -> None:
    gate, up, down = names
    recipes.make(f"{ours}{gate}.weight", f"{theirs}linear_fc1.weight", by=lambda joined: joined.chunk(2)[0])
    recipes.make(f"{ours}{up}.weight", f"{theirs}linear_fc1.weight", by=lambda joined: joined.chunk(2)[1])
    recipes.make(f"{ours}{down}.weight", f"{theirs}linear_fc2.weight")


def _mixture(recipes: Recipes, ours: str, theirs: str, names: tuple[str, str, str], experts: int) -> None:
    recipes.make(f"{ours}gate.weight", f"{theirs}mlp.router.weight")
    for expert in range(experts):
        _gated(recipes, f"{ours}experts.{expert}.", f"{theirs}mlp.experts.local_experts.{expert}.", names)


def _config(
    source: MegatronWeights, recipes: Recipes, heads: AttentionHeads, model_type: str, experts: int
) -> dict[str, Any]:
    args = source.args
    vocab_size, width = recipes.shape("embedding.word_embeddings.weight")
    inner = "decoder.layers.0.mlp.experts.local_experts.0." if experts else "decoder.layers.0.mlp."
    hidden = recipes.shape(f"{inner}linear_fc2.weight")[1]
    config: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": args.count("num_layers"),
        "num_attention_heads": heads.queries,
        "num_key_value_heads": heads.groups,
        "max_position_embeddings": args.count("max_position_embeddings"),
        "rms_norm_eps": float(args("norm_epsilon", 1e-5)),
        "rope_parameters": _rope(source),
        "tie_word_embeddings": source.tied,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if model_type.startswith("qwen3") or heads.size != width // heads.queries:
        config["head_dim"] = heads.size
    if experts:
        count = "num_local_experts" if model_type == "mixtral" else "num_experts"
        config |= {count: experts, "num_experts_per_tok": args.count("moe_router_topk")}
    if model_type == "qwen3_moe":
        config |= {
            "moe_intermediate_size": hidden,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _rope(source: MegatronWeights) -> dict[str, Any]:
    base = {"rope_theta": float(source.args("rotary_base", 10000))}
    if not source.args("use_rope_scaling", False):
        return {"rope_type": "default", **base}
    return {"rope_type": "llama3", **base, "factor": float(source.args("rope_scaling_factor", 8.0)), **_LLAMA_3}


# The format `torch`: one file per rank, in which layers are numbered from 0 in each pipeline stage.


_ROWS = re.compile(r"(?:word_embeddings|output_layer|linear_qkv|linear_fc1)\.(?:weight|bias)$")
"""Names of column-parallel tensors: sharded along their first dimension."""
_COLUMNS = re.compile(r"(?:linear_proj|linear_fc2)\.weight$")
"""Names of row-parallel tensors: sharded along their second dimension."""
_EXPERT = re.compile(r"(\.mlp\.experts\.local_experts\.)(\d+)\.")

TensorParallelParts = dict[str, list[PickledTensor]]
"""The shards of each tensor by name, one per tensor-parallel rank."""


def read_ranks(path: Path) -> MegatronWeights:
    """Return the weights of an iteration, assembled from the shards of its ranks when they are read."""
    files = rank_files(path)
    contents = {coordinates: _content(file) for coordinates, file in sorted(files.items())}
    args = Arguments(next(iter(contents.values())).get("args"), path)
    shape = _Shape(args)
    missing = [coordinates for coordinates in shape.all_coordinates() if coordinates not in contents]
    if missing:
        sizes = f"{shape.tensor} × {shape.pipeline} × {shape.experts} ranks (tensor, pipeline, experts)"
        raise CheckpointError(
            f"{path} was saved by {sizes}, and {_folder(missing[0])} is not there; copy all of its folders"
        )
    tensors = _collect(contents, shape)
    gated = bool(args("swiglu", False))
    entries = {name: _entry(name, pieces) for name, pieces in tensors.items()}

    def read(name: str) -> Tensor:
        return _join(name, [piece.read() for piece in tensors[name]], gated=gated)

    step = str(next(iter(contents.values())).get("iteration", "unknown"))
    return MegatronWeights(path, entries, read, args, {"format": "torch", "step": step, "files": str(len(files))})


class _Shape:
    """The number of ranks along each axis, and the names of their folders."""

    def __init__(self, args: Arguments) -> None:
        self.tensor = args.count("tensor_model_parallel_size")
        self.pipeline = args.count("pipeline_model_parallel_size")
        self.experts = args("expert_model_parallel_size", 1)
        split = args("expert_tensor_parallel_size", self.tensor)
        if args("num_experts") and split != self.tensor:
            raise CheckpointError(
                f"its experts are sharded over {split} ranks and other layers over {self.tensor}; save it with "
                "--ckpt-format torch_dist, which can be read"
            )

    def coordinates(self, tensor: int, stage: int, expert: int) -> Coordinates:
        """Return the coordinates of a rank, as in the name of its folder."""
        stages = (stage,) if self.pipeline > 1 else ()
        return (tensor, *stages, *((expert,) if self.experts > 1 else ()))

    def all_coordinates(self) -> list[Coordinates]:
        """Return the coordinates of all ranks."""
        return [
            self.coordinates(tensor, stage, expert)
            for tensor in range(self.tensor)
            for stage in range(self.pipeline)
            for expert in range(self.experts)
        ]


def _folder(coordinates: Coordinates) -> str:
    first, *others = coordinates
    return "_".join([f"mp_rank_{first:02d}", *(f"{number:03d}" for number in others)])


def _content(file: Path) -> Mapping[str, Any]:
    content = open_file(file)
    if not isinstance(content, Mapping) or not _models(content):
        raise CheckpointError(f"{file} does not hold a Megatron model: it lacks `model`")
    if any("language_model" in model for model in _models(content)):
        raise CheckpointError(
            f"{file} holds a model from before Megatron Core; convert it with Megatron-LM's tools/checkpoint/convert.py"
        )
    return content


def _models(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the state dicts of a rank's model: one, or one for each virtual pipeline stage."""
    if isinstance(content.get("model"), Mapping):
        return [content["model"]]
    names = sorted((name for name in content if re.fullmatch(r"model\d+", name)), key=lambda name: int(name[5:]))
    return [content[name] for name in names]


def _collect(contents: Mapping[Coordinates, Mapping[str, Any]], shape: _Shape) -> TensorParallelParts:
    tensors: TensorParallelParts = {}
    first_layer = 0
    pieces = len(_models(next(iter(contents.values()))))
    for piece in range(pieces):  # the first virtual stages of all ranks come before the second ones
        for stage in range(shape.pipeline):
            layers = 0
            for expert in range(shape.experts):
                ranks = [_models(contents[shape.coordinates(t, stage, expert)])[piece] for t in range(shape.tensor)]
                stage_tensors = _of_stage(ranks, first_layer, expert, shape)
                tensors |= {name: shards for name, shards in stage_tensors.items() if name not in tensors}
                layers = _layers(ranks[0])
            first_layer += layers
    return tensors


def _layers(model: Mapping[str, Any]) -> int:
    """Return the number of layers in a stage."""
    return len({match[1] for name in model if (match := re.match(LAYER, name))})


def _of_stage(ranks: Sequence[Mapping[str, Any]], first_layer: int, expert: int, shape: _Shape) -> TensorParallelParts:
    """Return the shards that the ranks of one stage hold, by name, with layers numbered over the whole model."""
    local_experts = {match[2] for name in ranks[0] if (match := _EXPERT.search(name))}

    def of_model(name: str) -> str:
        name = re.sub(LAYER, lambda match: f"decoder.layers.{first_layer + int(match[1])}.", name)
        return _EXPERT.sub(lambda match: f"{match[1]}{expert * len(local_experts) + int(match[2])}.", name)

    named = [
        name for name, held in ranks[0].items() if isinstance(held, PickledTensor) and not re.search(IGNORED, name)
    ]
    return {of_model(name): [rank[name] for rank in ranks] for name in named}


def _entry(name: str, shards: Sequence[PickledTensor]) -> TensorEntry:
    first = shards[0]
    shape = list(first.shape)
    if _ROWS.search(name):
        shape[0] = sum(shard.shape[0] for shard in shards)
    elif _COLUMNS.search(name):
        shape[1] = sum(shard.shape[1] for shard in shards)
    return TensorEntry(torch.Size(shape), first.dtype)


def _join(name: str, shards: Sequence[Tensor], *, gated: bool) -> Tensor:
    if _COLUMNS.search(name):
        return torch.cat(list(shards), dim=1)
    if not _ROWS.search(name):
        return shards[0]
    if (
        gated and "linear_fc1" in name
    ):  # each rank's matrix has its shard of the gate, then its shard of the up projection
        return torch.cat(
            [half for halves in zip(*(shard.chunk(2) for shard in shards), strict=True) for half in halves]
        )
    return torch.cat(list(shards))


_POSITIONS = "embedding.position_embeddings.weight"
_VOCAB_TENSORS = ("model.model.embed_tokens.weight", "model.transformer.wte.weight", "model.lm_head.weight")
"""The tensors with one row per token of the vocabulary."""


def open_megatron(path: Path) -> Source:
    """Return the weights under the names of `transformers`; `state["config"]` describes the model.

    Megatron need not be installed, and nothing in the files is executed. The optimizer's state is left out.
    """
    folder = iteration(path)
    if rank_files(folder):
        source = read_ranks(folder)
    else:
        check_backend(folder)
        source = read_distributed(folder)
    described = as_gpt2(source) if f"model.{_POSITIONS}" in source.entries else as_llama(source)
    _refuse_the_rest(source, {name for names, _ in described.recipes.values() for name in names})
    model = {"type": "hf", "config": described.config}
    return View(source, described.recipes, state={"config": {"model": model}})


def _refuse_the_rest(source: MegatronWeights, used: set[str]) -> None:
    copied = {"model.output_layer.weight"} if source.tied else set()
    left = sorted(name.removeprefix("model.") for name in source.entries.keys() - used - copied)
    if left:
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        raise CheckpointError(f"{source.path} holds tensors that no supported model has: {shown}")


def without_padding(source: Source, vocab_size: int) -> Source:
    """Return a source without the rows by which Megatron pads the vocabulary to divide it evenly among ranks."""
    return first_rows(source, [name for name in _VOCAB_TENSORS if name in source.entries], vocab_size)
