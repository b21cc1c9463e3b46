"""`data`, `val_data`, `test_data`: what to train and measure on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, PositiveFloat, Tag, model_validator

from plait.config.base import Many, NonNegativeInt, PathText, PositiveInt, RefusedError, Section, Size
from plait.config.part import BUILTIN_TAG, CUSTOM_TAG, CustomPart, ImportedPart, builtin_or_custom

SMALLEST_BPE = 257
"""Vocabulary of a byte-level BPE without any merge: the bytes and the end token."""
MAX_WORKERS = 1024
"""Of one rank: each is a process, and a machine with very many of them does nothing else."""


class CustomCollate(CustomPart):
    """A function of one's own that makes a batch of a list of samples, called with the further keys too."""

    plugin_kind = "collate"


class _Loading(Section):
    shuffle: bool | None = None
    """Absent: yes for training, no for validation and test."""
    workers: Annotated[NonNegativeInt, Field(le=MAX_WORKERS)] = 0
    """Processes that load ahead of training."""
    pin_memory: bool | None = None
    """Absent: when training on CUDA."""
    drop_last: bool = False
    """Leave out the last, smaller batch of an epoch."""
    collate: CustomCollate | None = None
    """What makes a batch of a list of samples. Absent: they are stacked."""


class _TextSection(_Loading):
    tokenizer: PathText | None = None
    """A `tokenizer.json`. Absent: a byte-level BPE is trained on the text itself."""
    vocab_size: Annotated[Size, Field(ge=SMALLEST_BPE)] = 4096
    """Size of the BPE when one is trained; a given tokenizer has its own. Absent: no more than `model.vocab_size`."""
    seq_len: Size = 1024
    document_mask: bool = True
    """Tokens attend within their own document only."""
    split: Literal["all", "train", "val"] = "all"
    """`train` and `val` are the two parts of one source, cut by document."""
    val_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    cache: PathText | None = None
    """Folder for the tokenized files. Absent: `plait` in the user's cache folder."""


class TokensData(_Loading):
    """A token memmap that was written before."""

    builds = "plait.data.sources:token_file"

    type: Literal["tokens"] = "tokens"
    path: PathText
    seq_len: Size = 1024
    document_mask: bool = True
    split: Literal["all", "train", "val"] = "all"
    val_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05


class TextData(_TextSection):
    """Plain text files, packed into sequences."""

    builds = "plait.data.sources:packed_text"

    type: Literal["text"] = "text"
    path: PathText
    """A file, a folder, a glob, or `stdlib`: the Python standard library's own sources."""
    limit_mb: PositiveFloat | None = None
    """Only the first files, in the order of their names, that together are no larger."""


class JsonlData(_TextSection):
    """One JSON object a line: whole texts, or prompts with completions (only those are trained on)."""

    builds = "plait.data.sources:packed_text"

    type: Literal["jsonl"] = "jsonl"
    path: PathText
    text_key: str | None = None
    prompt_key: str | None = None
    completion_key: str | None = None

    @model_validator(mode="after")
    def _one_way(self) -> JsonlData:
        pair = (self.prompt_key, self.completion_key)
        if (None in pair) if self.text_key is None else (pair != (None, None)):
            given = ", ".join(k for k in ("text_key", "prompt_key", "completion_key") if getattr(self, k)) or "none"
            raise RefusedError(f"keys given: {given}", "Give either text_key, or prompt_key and completion_key.")
        return self


class ImageFolderData(_Loading):
    """`path/class_name/*.png|jpg`."""

    builds = "plait.data.sources:image_folder"

    type: Literal["image_folder"] = "image_folder"
    path: PathText
    size: Size = 224
    augment: bool | None = None
    """Random crop and flip. Absent: yes for training."""


class Cifar10Data(_Loading):
    """CIFAR-10 in its published binary or Python form."""

    builds = "plait.data.sources:cifar10"

    type: Literal["cifar10"] = "cifar10"
    path: PathText
    split: Literal["train", "test"] = "train"
    augment: bool | None = None


class ImportedData(ImportedPart, _Loading):
    """The older form of a data set of one's own: `target: my_module:make_dataset`."""


class CustomData(_Loading, CustomPart):
    """A data set of one's own: a class or function that makes it, called with the further keys."""

    plugin_kind = "data"
    builtin = ("tokens", "text", "jsonl", "image_folder", "cifar10", "mixture", "import")


CUSTOM_DATA = (ImportedData, CustomData)
"""The sections of data of one's own, of which nothing is known before they are made."""

DataSource = Annotated[
    Annotated[
        Annotated[
            TokensData | TextData | JsonlData | ImageFolderData | Cifar10Data | ImportedData,
            Field(discriminator="type"),
        ],
        Tag(BUILTIN_TAG),
    ]
    | Annotated[CustomData, Tag(CUSTOM_TAG)],
    Discriminator(builtin_or_custom(CustomData)),
]


class MixtureData(_Loading):
    """Several sources at once, each with its share of every epoch."""

    builds = "plait.data.sources:mixture"

    type: Literal["mixture"] = "mixture"
    sources: Annotated[Many[DataSource], Field(min_length=2)]
    """Each as it would be described alone, without `shuffle`, `workers`, `pin_memory`, `drop_last` and `collate`."""
    weights: Many[PositiveFloat] = ()
    """Shares of the sources, one number for each. Absent: as many samples as each has."""
    samples: PositiveInt | None = None
    """Samples in an epoch. Absent: as many as the sources have together."""

    @property
    def seq_len(self) -> int:
        """That of the sources, where they have one."""
        for source in self.sources:
            if isinstance(length := getattr(source, "seq_len", None), int):
                return length
        raise AttributeError("seq_len")


DataConfig = Annotated[
    Annotated[
        Annotated[
            TokensData | TextData | JsonlData | ImageFolderData | Cifar10Data | ImportedData | MixtureData,
            Field(discriminator="type"),
        ],
        Tag(BUILTIN_TAG),
    ]
    | Annotated[CustomData, Tag(CUSTOM_TAG)],
    Discriminator(builtin_or_custom(CustomData)),
]


def leaf_sources(path: str, data: DataConfig | None) -> list[tuple[str, DataSource]]:
    """What is read in the end, with the place where it is described: the sources of a mixture, or the one there is."""
    if isinstance(data, MixtureData):
        return [(f"{path}.sources.{index}", source) for index, source in enumerate(data.sources)]
    return [] if data is None else [(path, data)]


def text_sources(path: str, data: DataConfig | None) -> list[tuple[str, TextData | JsonlData]]:
    """Those of them that are tokenized. They share one tokenizer, which is that of the first."""
    return [(key, source) for key, source in leaf_sources(path, data) if isinstance(source, TextData | JsonlData)]


def sample_unit(data: DataConfig | None) -> str:
    """What a run's speed is counted in: `images`, or `tokens`."""
    images = any(isinstance(source, ImageFolderData | Cifar10Data) for _, source in leaf_sources("data", data))
    return "images" if images else "tokens"
