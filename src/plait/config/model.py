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
"""More layers than any model has; a typo must not build modules forever."""


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
    """Fewer than `heads` is grouped-query attention. Absent: as many as `heads`."""
    ffn_dim: Size | None = None
    """Absent: 8/3 of `dim`, rounded up to a multiple of 64."""
    seq_len: Size = 4096
    """The longest sequence that the model is made for."""
    rope_base: PositiveFloat = 10000.0
    norm_eps: PositiveFloat = 1e-5
    tie_embeddings: bool = False


class MoeConfig(LlamaConfig):
    """A Llama whose feed-forwards are mixtures of experts."""

    builds = "plait.models.moe:Moe"

    type: Literal["moe"] = "moe"  # type: ignore[assignment]  # a subclass of Llama
    experts: Size = 8
    """Number of experts per MoE layer."""
    top_k: PositiveInt = 2
    """Experts that each token is routed to."""
    expert_dim: Size | None = None
    """Width of one expert. Absent: that of the dense feed-forward."""
    shared_experts: NonNegativeInt = 0
    """Experts that every token goes through, besides those it is routed to."""
    moe_every: PositiveInt = 1
    """Every how many layers the feed-forward is a mixture of experts; the others, first in each group, are dense."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores: over all experts, or for each alone."""
    normalize: bool = True
    """Divide the weights of a token's experts by their sum. With `top_k: 1` the weight would always be 1."""
    balance_loss: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the load-balancing loss within each row of a batch. Training only."""
    z_loss: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the loss that keeps router logits small (router z-loss). Training only."""
    bias_rate: Annotated[float, Field(ge=0.0)] = 0.0
    """Load balancing without a loss: how much each step changes an expert's routing bias, against its load."""
    capacity_factor: PositiveFloat | None = None
    """Tokens that an expert takes of one row, as a multiple of an even share; further ones are dropped, in the order of
    the row. Absent, and outside of training, nothing is dropped."""


class ResNetConfig(Section):
    """A residual network for image classification."""

    builds = "plait.models.resnet:ResNet"

    type: Literal["resnet"] = "resnet"
    depth: Literal[18, 34, 50, 101, 152] = 50
    classes: Size = 1000
    stem: Literal["imagenet", "cifar"] = "imagenet"
    """`cifar`: for small images, a 3×3 first convolution and no pooling."""


class HFConfig(Section):
    """Any `transformers` model, unedited."""

    builds = "plait.models.hf:build_hf_model"

    type: Literal["hf"] = "hf"
    path: PathText | None = None
    """Folder with `config.json`, and weights where `pretrained`."""
    config: dict[str, Any] | None = None
    """A `transformers` config as a mapping with `model_type`; weights are initialized at random."""
    task: Literal[
        "causal-lm",
        "masked-lm",
        "seq2seq-lm",
        "sequence-classification",
        "image-classification",
        "masked-image-modeling",
        "contrastive-image-text",
        "image-text-to-text",
        "speech-seq2seq",
        "base",
    ] = "causal-lm"
    num_labels: Size | None = None
    """Outputs of a classifier. Absent: those of the model's config."""
    pretrained: bool = True
    """With `path`: load the weights (true) or only the architecture (false)."""


class ImportedModel(ImportedPart):
    """The older form of a custom model: `target: my_package.my_module:MyModel`."""


class CustomModel(CustomPart):
    """A custom model: a class or function that makes a `torch.nn.Module`, called with the further keys."""

    plugin_kind = "model"
    builtin = ("gpt", "llama", "moe", "resnet", "hf", "import")


CUSTOM_MODELS = (ImportedModel, CustomModel)
"""The sections of custom models, of which nothing is known before they are built."""

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

LAYER_KEYS = ("layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Keys of model configs for the number of layers."""


def depth_of(model: ModelConfig | None) -> int | None:
    """Return the number of layers of a model; None where its section has none."""
    if isinstance(model, GptConfig | LlamaConfig):
        return model.layers
    settings = _settings(model)
    key = _layer_key(settings)
    return None if key is None else int(settings[key])


def with_depth(model: ModelConfig, layers: int) -> ModelConfig:
    """Return the model with another number of layers. `depth_of` must know its number."""
    if isinstance(model, GptConfig | LlamaConfig):
        return model.model_copy(update={"layers": layers})
    settings = _settings(model)
    key = _layer_key(settings)
    assert key is not None
    # Some models have a list with an entry per layer.
    lists = {name: value[:layers] for name, value in settings.items() if _is_per_layer(value, settings[key])}
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


def _is_per_layer(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count
