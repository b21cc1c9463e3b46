"""Loaders and batch sizes, from the sections of a run description and from objects that a script gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch import nn
from torch.utils.data import DataLoader, Dataset

from plait.config import (
    BatchConfig,
    CustomData,
    CustomModel,
    DataConfig,
    GptConfig,
    HFConfig,
    JsonlData,
    LlamaConfig,
    Parsed,
    ResolvedBatch,
    RunConfig,
    Section,
    TextData,
    TokensData,
    leaf_sources,
    resolve_batch,
    text_sources,
)
from plait.data import RankLoader, build_dataset, is_stream, prepare, stack, tokenizer_path, unwrap_dataloader
from plait.distributed import World, is_transformers_model, on_main
from plait.engine import configured_loss
from plait.errors import ConfigError, Problem
from plait.plugins import load_function

if TYPE_CHECKING:
    from plait.trainer.hooks import Hook
    from plait.trainer.metrics import Metric


class MapStyle(Protocol):
    """A data set with a length, whose samples are read by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


Data: TypeAlias = Dataset[Any] | DataLoader[Any] | MapStyle | Iterable[Any]
"""The objects that may be given as data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenObjects:
    """The objects that a script gives to a run, beside its description."""

    model: nn.Module | Callable[[], nn.Module] | None = None
    data: Any = None
    val_data: Any = None
    test_data: Any = None
    loss_fn: Any = None
    collate_fn: Any = None
    hooks: Sequence[Hook] = ()
    metrics: Sequence[Metric] = ()


def settle(parsed: Parsed, given: GivenObjects) -> tuple[Parsed, GivenObjects]:
    """Return both, after moving objects from the description to `GivenObjects`.

    A module or a DataLoader inside of a section is treated as if it had been given beside the description. The loss
    function that `train.loss` names becomes `given.loss_fn`; naming it in both places raises a `ConfigError`.
    """
    config = parsed.config
    moved: dict[str, Any] = {}
    if (
        isinstance(config.model, CustomModel)
        and isinstance(config.model.given, nn.Module)
        and not config.model.arguments
    ):
        moved["model"] = config.model.given
    for role in ("data", "val_data", "test_data"):
        section = getattr(config, role)
        if isinstance(section, CustomData) and isinstance(section.given, DataLoader):
            if further := section.model_fields_set - {"type"}:
                message = "a DataLoader says itself how it loads, and takes no arguments"
                raise ConfigError(Problem(f"{role}.{min(further)}", message, "Say it where the DataLoader is made."))
            moved[role] = section.given
    if moved:
        parsed = replace(parsed, config=config.model_copy(update=dict.fromkeys(moved)))
        given = replace(given, **moved)
    if config.train.loss is not None and given.loss_fn is not None:
        raise ConfigError(Problem("train.loss", "`loss_fn` was given from Python as well", "Leave out one of the two."))
    return parsed, given if given.loss_fn is not None else replace(given, loss_fn=configured_loss(config))


def is_section(value: Any) -> bool:
    """Return whether data or a model are a section (`{type: …}`, or a name alone) and not an object."""
    return isinstance(value, (str, Section)) or (isinstance(value, Mapping) and "type" in value)


def batch_of(config: RunConfig, data_parallel: int, given: Any, *, split: int = 1) -> ResolvedBatch:
    """Return the batch sizes for `data_parallel` ranks, that is, ranks that read different samples.

    If the section does not determine the micro-batch, it is the batch size of a DataLoader in `given`. `split`: into
    how many parts each micro-batch is split (more than one after an attempt that ran out of memory).
    """
    section = config.batch
    if (
        isinstance(given, DataLoader)
        and section.micro is None
        and (section.total is None or section.accumulation is None)
    ):
        section = BatchConfig(
            total=section.total, micro=unwrap_dataloader(given).micro, accumulation=section.accumulation
        )
    micro_batches = config.strategy.pipeline.micro_batches
    batch = resolve_batch(section, data_parallel, micro_batches=micro_batches)
    if split > 1 and config.strategy.engine != "native":
        message = f"memory was short with {batch.micro}, and the engine {config.strategy.engine_name} is told once"
        raise ConfigError(Problem("batch.micro", message, "Write a smaller one."))
    contrastive = isinstance(config.model, HFConfig) and config.model.task == "contrastive-image-text"
    if split > 1 and contrastive:
        message = f"memory was short with {batch.micro}, and a smaller one would compare fewer samples in the loss"
        raise ConfigError(Problem("batch.micro", message, "Write `strategy.recompute: full`, or a smaller batch."))
    return batch.split(split)


def refuse_second_shift(model: nn.Module, config: RunConfig) -> None:
    """Raise a `ConfigError` if both the data and the model shift labels by one token.

    The model would then learn to predict the token after the next one.
    """
    inner: Any = getattr(model, "get_base_model", lambda: model)()  # the model inside of a `peft` model
    if not is_transformers_model(inner) or hasattr(inner, "block_classes"):
        return
    for role in ("data", "val_data", "test_data"):
        for path, source in leaf_sources(role, getattr(config, role)):
            if isinstance(source, (TokensData, TextData, JsonlData)):
                message = (
                    f"a {type(inner).__name__} was given as an object and shifts its labels itself, and those of "
                    f"`{path}` are the next tokens already"
                )
                remedy = (
                    "Describe the model (`model: {type: hf, path: …}`), or give a data set whose labels are its tokens."
                )
                raise ConfigError(Problem("model", message, remedy))


def make_loader(
    role: str, config: RunConfig, world: World, batch: ResolvedBatch, *, given: Any, collate: Any = None
) -> RankLoader | None:
    """Return the loader of `data`, `val_data` or `test_data` (the role); None if there are no such data.

    Validation and test have batches of the same size as training, so that `train.val_batches` covers the same samples
    on any number of ranks; a DataLoader keeps its own batch size for them.
    """
    training = role == "data"
    section = getattr(config, role)
    common: dict[str, Any] = {
        "rank": world.data_rank,
        "ranks": world.layout.data_parallel,
        "seed": config.seed,
        "batch": batch,
    }
    if section is not None:
        if section.collate is not None:
            if collate is not None:
                message, remedy = "`collate_fn` was given from Python as well", "Leave out one of the two."
                raise ConfigError(Problem(f"{role}.collate", message, remedy))
            collate = load_function(section.collate, f"{role}.collate", "samples")
        dataset = _described(role, section, config, world)
        pinned = section.pin_memory if section.pin_memory is not None else world.device.type == "cuda"
        return RankLoader(
            dataset,
            shuffle=training and not is_stream(dataset) if section.shuffle is None else section.shuffle,
            drop_last=section.drop_last,
            workers=section.workers,
            pin_memory=pinned,
            collate=collate or getattr(dataset, "collate", None),
            **common,
        )
    if given is None:
        return None
    if isinstance(given, DataLoader):
        if not training:
            micro = unwrap_dataloader(given).micro
            common["batch"] = ResolvedBatch(micro * world.layout.data_parallel, micro, 1)
        return RankLoader.from_dataloader(given, split=world.ranks.split > 1, **common)
    return RankLoader(
        given,
        shuffle=training and not is_stream(given),
        pin_memory=world.device.type == "cuda",
        collate=collate,
        **common,
    )


def first_inputs(data: Any, micro: int, collate: Any) -> Any:
    """Return one micro-batch of data given as an object, for its shapes; None if reading it would consume the data."""
    if isinstance(data, DataLoader):
        loader = unwrap_dataloader(data)
        data, collate = loader.dataset, loader.collate
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or len(data) == 0:
        return None
    return (collate or stack)([data[index % len(data)] for index in range(micro)])


def _described(role: str, section: DataConfig, config: RunConfig, world: World) -> Any:
    training = role == "data"
    # Rank 0 prepares files that all ranks read, such as tokenized text, while the others wait.
    tokenizer = on_main(world, lambda: _prepare(role, section, config))
    dataset = build_dataset(section, training=training, seed=config.seed, tokenizer=tokenizer, role=role)
    needed, known = getattr(dataset, "vocab_size", None), _vocabulary(config)
    if needed is not None and known is not None and needed > known:
        message = f"{known}, but the tokens of `{role}` come from a vocabulary of {needed}"
        raise ConfigError(Problem("model.vocab_size", message, f"Write `model.vocab_size: {needed}`."))
    for source in getattr(dataset, "sources", [dataset]):
        _refuse_other_settings(role, source, config)
    return dataset


_PAD_IS_READ = ("masked-lm", "seq2seq-lm", "sequence-classification")
"""Tasks of models that may read the padding token's id: positions count from it, or the last token is found by it."""


def _refuse_other_settings(role: str, dataset: Any, config: RunConfig) -> None:
    """Raise a `ConfigError` if the config of a `transformers` model does not fit the tokens or classes of the data."""
    tokens, labels = getattr(dataset, "special_tokens", {}), getattr(dataset, "num_labels", None)
    if not isinstance(config.model, HFConfig) or (not tokens and labels is None):
        return
    model = config.model
    from plait.models import hf_config  # with transformers and the compiler: only where a model needs them

    settings = hf_config(model, trust_code=config.trust_code)
    key = "model.config" if model.path is None else "model.path"
    pad = getattr(settings.get_text_config(), "pad_token_id", None)
    if model.task in _PAD_IS_READ and "pad" in tokens and isinstance(pad, int) and pad != tokens["pad"]:
        message = f"the model's pad_token_id is {pad}, but the tokenizer of `{role}` pads with {tokens['pad']}"
        remedy = f"Write `model.config.pad_token_id: {tokens['pad']}`."
        raise ConfigError(Problem(key, message, remedy if model.path is None else "Give the model's own tokenizer."))
    if labels is not None and model.task.endswith("-classification") and settings.num_labels < labels:
        message = f"the model has {settings.num_labels} outputs, but `{role}` has {labels} classes"
        raise ConfigError(Problem("model.num_labels", message, f"Write `model.num_labels: {labels}`."))


def _prepare(role: str, section: DataConfig, config: RunConfig) -> Path | None:
    """Tokenize text if there is any; return the tokenizer of the training data if these data use it, else None."""
    tokenizer = None
    if role != "data" and any(text.tokenizer is None for _, text in text_sources(role, section)[:1]):
        tokenizer = tokenizer_path(config.data)
        if tokenizer is None:
            message = "there is none, and the training data have none to share"
            remedy = "Name the tokenizer.json that made the training tokens."
            raise ConfigError(Problem(f"{role}.tokenizer", message, remedy))
    prepare(section, tokenizer=tokenizer)
    return tokenizer


def _vocabulary(config: RunConfig) -> int | None:
    """Return the vocabulary size in the model's section; None if it has none."""
    if isinstance(config.model, (GptConfig, LlamaConfig)):
        return config.model.vocab_size
    size = (config.model.config or {}).get("vocab_size") if isinstance(config.model, HFConfig) else None
    return size if isinstance(size, int) else None
