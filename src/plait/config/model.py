"""`model`: what to train."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PositiveFloat, Tag

from plait.config.base import NonNegativeInt, PathText, PositiveInt, Section, Size
from plait.config.part import BUILTIN_TAG, CUSTOM_TAG, CustomPart, ImportedPart, builtin_or_custom
from plait.config.read import read_json_object
from plait.errors import ModelError

Layers = Annotated[PositiveInt, Field(le=100_000)]
"""Deeper than any model: each layer is an object of Python, and a slip of the finger would be built for ever."""


class GptConfig(Section):
    """A GPT-2 style decoder: learned positions, LayerNorm, GELU."""

    builds = "plait.models.gpt:Gpt"

    type: Literal["gpt"] = "gpt"
    vocab_size: Size = 50257
    dim: Size = 768
    layers: Layers = 12
    heads: Size = 12
    seq_len: Size = 1024
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    bias: bool = True
    tie_embeddings: bool = True


class LlamaConfig(Section):
    """A Llama style decoder: RoPE, RMSNorm, SwiGLU, grouped-query attention."""

    builds = "plait.models.llama:Llama"

    type: Literal["llama"] = "llama"
    vocab_size: Size = 32000
    dim: Size = 2048
    layers: Layers = 16
    heads: Size = 32
    kv_heads: Size | None = None
    """Fewer than `heads` is grouped-query attention; absent means one for each head."""
    ffn_dim: Size | None = None
    """Absent means 8/3 of `dim`, rounded up to a multiple of 64."""
    seq_len: Size = 4096
    """The longest sequence it is made for."""
    rope_base: PositiveFloat = 10000.0
    norm_eps: PositiveFloat = 1e-5
    tie_embeddings: bool = False


class MoeConfig(LlamaConfig):
    """A Llama whose feed-forwards are mixtures of experts."""

    builds = "plait.models.moe:Moe"

    type: Literal["moe"] = "moe"  # type: ignore[assignment]  # a Llama of another kind
    experts: Size = 8
    """Experts of each mixture."""
    top_k: PositiveInt = 2
    """Experts that each token is sent to."""
    expert_dim: Size | None = None
    """Width of one expert; absent means that of the dense feed-forward."""
    shared_experts: NonNegativeInt = 0
    """Experts that every token goes through, besides those it is sent to."""
    moe_every: PositiveInt = 1
    """Every how many layers the feed-forward is a mixture; the others are dense, the first ones of each group."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's numbers become scores: of all experts together, or of each alone."""
    normalize: bool = True
    """Divide the weights of a token's experts by their sum. With `top_k: 1` that would leave 1, whatever the score."""
    balance_loss: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the loss that evens out the experts' load within each row of a batch. Training only."""
    z_loss: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the loss that keeps the router's numbers small. Training only."""
    bias_rate: Annotated[float, Field(ge=0.0)] = 0.0
    """Balance without a loss: how far each step moves an expert's bias for being chosen, against its load."""
    capacity_factor: PositiveFloat | None = None
    """Choices that an expert takes of one row, as a multiple of an even share; further ones are dropped, in the
    order of the row. Absent, and outside of training, nothing is dropped."""


class ResNetConfig(Section):
    """A residual network for image classification."""

    builds = "plait.models.resnet:ResNet"

    type: Literal["resnet"] = "resnet"
    depth: Literal[18, 34, 50, 101, 152] = 50
    classes: Size = 1000
    stem: Literal["imagenet", "cifar"] = "imagenet"
    """`cifar` keeps small images large: a 3×3 first convolution, no pooling."""


class HFConfig(Section):
    """Any `transformers` model, unedited."""

    builds = "plait.models.hf:build_hf_model"

    type: Literal["hf"] = "hf"
    path: PathText | None = None
    """Folder with `config.json`, and weights where `pretrained`."""
    config: dict[str, Any] | None = None
    """A `transformers` config as a mapping with `model_type`; weights start random."""
    task: Literal["causal-lm", "masked-lm", "seq2seq-lm", "sequence-classification", "base"] = "causal-lm"
    pretrained: bool = True
    """With `path`: load the weights (true) or only the architecture (false)."""


class ImportedModel(ImportedPart):
    """The older form of a model of one's own: `target: my_package.my_module:MyModel`."""


class CustomModel(CustomPart):
    """A model of one's own: a class or function that makes a `torch.nn.Module`, called with the further keys."""

    plugin_kind = "model"
    builtin = ("gpt", "llama", "moe", "resnet", "hf", "import")


CUSTOM_MODELS = (ImportedModel, CustomModel)
"""The sections of models of one's own, of which nothing is known before they are made."""

ModelConfig = Annotated[
    Annotated[
        Annotated[
            GptConfig | LlamaConfig | MoeConfig | ResNetConfig | HFConfig | ImportedModel, Field(discriminator="type")
        ],
        Tag(BUILTIN_TAG),
    ]
    | Annotated[CustomModel, Tag(CUSTOM_TAG)],
    Discriminator(builtin_or_custom(CustomModel)),
]

# How many layers a described model has, and the same model with another number of them.


LAYER_KEYS = ("layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""How models call their number of layers."""


def depth_of(model: ModelConfig | None) -> int | None:
    """The number of layers; None where there is no such number."""
    if isinstance(model, GptConfig | LlamaConfig):
        return model.layers
    settings = _settings(model)
    key = _layer_key(settings)
    return None if key is None else int(settings[key])


def with_depth(model: ModelConfig, layers: int) -> ModelConfig:
    """The model with so many layers; one that `depth_of` knows the number of."""
    if isinstance(model, GptConfig | LlamaConfig):
        return model.model_copy(update={"layers": layers})
    settings = _settings(model)
    key = _layer_key(settings)
    assert key is not None
    # Some models list what each layer is.
    lists = {name: value[:layers] for name, value in settings.items() if _one_each(value, settings[key])}
    fewer = {**settings, **lists, key: layers}
    if isinstance(model, ImportedModel):
        return model.model_copy(update={"args": fewer})
    if isinstance(model, CustomModel):
        return model.model_copy(update=fewer)
    return model.model_copy(update={"config": fewer, "path": None})


def _settings(model: ModelConfig | None) -> Mapping[str, Any]:
    if isinstance(model, ImportedModel):
        return model.args
    if isinstance(model, CustomModel):
        return model.arguments
    if not isinstance(model, HFConfig):
        return {}
    if model.config is not None:
        return model.config
    return read_json_object(Path(model.path or ".").expanduser() / "config.json", ModelError)


def _layer_key(settings: Mapping[str, Any]) -> str | None:
    return next((key for key in LAYER_KEYS if isinstance(settings.get(key), int)), None)


def _one_each(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count
