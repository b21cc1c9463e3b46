"""From the sections and objects a user gives to loaders."""

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
    """A data set that knows how many samples it has, and gives each by its number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


Data: TypeAlias = Dataset[Any] | DataLoader[Any] | MapStyle | Iterable[Any]
"""What may be given as data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenObjects:
    """What a run is given as objects, beside its description."""

    model: nn.Module | Callable[[], nn.Module] | None = None
    data: Any = None
    val_data: Any = None
    test_data: Any = None
    loss_fn: Any = None
    collate_fn: Any = None
    hooks: Sequence[Hook] = ()
    metrics: Sequence[Metric] = ()


def settle(parsed: Parsed, given: GivenObjects) -> tuple[Parsed, GivenObjects]:
    """Both, with the loss that the description names among the objects, and without objects in the description.

    A module or a DataLoader that stands in a section is as if it had been given beside the description.
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
    """Whether data or a model were described (`{type: …}`, or a name alone) rather than given."""
    return isinstance(value, (str, Section)) or (isinstance(value, Mapping) and "type" in value)


def batch_of(config: RunConfig, data_parallel: int, given: Any, *, split: int = 1) -> ResolvedBatch:
    """The batch sizes on so many ranks that see different samples.

    A DataLoader's own batch size is the micro-batch where the section does not say. `split`: into how many parts
    micro-batches are split.
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
    return batch.split(split)


def refuse_second_shift(model: nn.Module, config: RunConfig) -> None:
    """Refuse labels that a model would shift once more: it would learn the token after the next."""
    inner: Any = getattr(model, "get_base_model", lambda: model)()  # what `peft` has wrapped
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
    """The loader of `data`, `val_data` or `test_data`; None where there are no such data.

    Validation and test go in batches of the same size as training, so that `train.val_batches` covers the
    same samples on any number of ranks.
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
            collate=collate,
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
    """One micro-batch of data that were given as an object, for its shapes; None where looking would use it up."""
    if isinstance(data, DataLoader):
        loader = unwrap_dataloader(data)
        data, collate = loader.dataset, loader.collate
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or len(data) == 0:
        return None
    return (collate or stack)([data[index % len(data)] for index in range(micro)])


def _described(role: str, section: DataConfig, config: RunConfig, world: World) -> Any:
    training = role == "data"
    # One rank prepares what all read (tokenized files, for example); the others find it ready.
    tokenizer = on_main(world, lambda: _prepare(role, section, config))
    dataset = build_dataset(section, training=training, seed=config.seed, tokenizer=tokenizer, role=role)
    needed, known = getattr(dataset, "vocab_size", None), _vocabulary(config)
    if needed is not None and known is not None and needed > known:
        message = f"{known}, but the tokens of `{role}` come from a vocabulary of {needed}"
        raise ConfigError(Problem("model.vocab_size", message, f"Write `model.vocab_size: {needed}`."))
    return dataset


def _prepare(role: str, section: DataConfig, config: RunConfig) -> Path | None:
    """Tokenize, where there is something to tokenize; returns the tokenizer that the training data share."""
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
    """How many tokens the described model knows, where its description says so."""
    if isinstance(config.model, (GptConfig, LlamaConfig)):
        return config.model.vocab_size
    size = (config.model.config or {}).get("vocab_size") if isinstance(config.model, HFConfig) else None
    return size if isinstance(size, int) else None
