"""`data`, `val_data`, `test_data`: what to train and measure on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, PositiveFloat, Tag, model_validator

from plait.config.base import Many, NonNegativeInt, PathText, PositiveInt, RefusedError, Section, Size
from plait.config.part import BUILTIN_TAG, CUSTOM_TAG, CustomPart, ImportedPart, builtin_or_custom

SMALLEST_BPE = 257
"""Vocabulary of a byte-level BPE without any merge: the bytes and the end token."""
MAX_WORKERS = 1024
"""The most data workers of one rank: each is a process."""


class CustomCollate(CustomPart):
    """A custom collate function, which makes a batch of a list of samples; it also gets the further keys."""

    plugin_kind = "collate"


class _Loading(Section):
    shuffle: bool | None = None
    """Absent: true for training, false for validation and test."""
    workers: Annotated[NonNegativeInt, Field(le=MAX_WORKERS)] = 0
    """Data worker processes."""
    pin_memory: bool | None = None
    """Absent: when training on CUDA."""
    drop_last: bool = False
    """Leave out the last, smaller batch of an epoch."""
    collate: CustomCollate | None = None
    """The collate function. Absent: samples are stacked."""


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
    """A token memmap that `plait.data.TokenWriter` wrote."""

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
    """Use only the first files by name, up to this size in all."""


class JsonlData(_TextSection):
    """One JSON object per line: whole texts, or prompts with completions (only completions are trained on)."""

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
            raise RefusedError(f"the keys {given} are given", "Give either text_key, or prompt_key and completion_key.")
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
    """The older form of a custom data set: `target: my_module:make_dataset`."""


class CustomData(_Loading, CustomPart):
    """A custom data set: a class or function that makes it, called with the further keys."""

    plugin_kind = "data"
    builtin = ("tokens", "text", "jsonl", "image_folder", "cifar10", "mixture", "import")


CUSTOM_DATA = (ImportedData, CustomData)
"""The sections of custom data, of which nothing is known before it is built."""

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
    """Several sources mixed, each with its share of every epoch."""

    builds = "plait.data.sources:mixture"

    type: Literal["mixture"] = "mixture"
    sources: Annotated[Many[DataSource], Field(min_length=2)]
    """Each as it is written alone, without `shuffle`, `workers`, `pin_memory`, `drop_last` and `collate`."""
    weights: Many[PositiveFloat] = ()
    """Shares of the sources, one number per source. Absent: in proportion to their samples."""
    samples: PositiveInt | None = None
    """Samples per epoch. Absent: all samples of the sources."""

    @property
    def seq_len(self) -> int:
        """The sequence length of the sources, where they have one."""
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
    """Return the sources that are read, with their keys: those of a mixture, or the only one."""
    if isinstance(data, MixtureData):
        return [(f"{path}.sources.{index}", source) for index, source in enumerate(data.sources)]
    return [] if data is None else [(path, data)]


def text_sources(path: str, data: DataConfig | None) -> list[tuple[str, TextData | JsonlData]]:
    """Return the sources that are tokenized, with their keys. They share the tokenizer of the first."""
    return [(key, source) for key, source in leaf_sources(path, data) if isinstance(source, TextData | JsonlData)]


def sample_unit(data: DataConfig | None) -> str:
    """Return the unit of a run's throughput: `images` or `tokens`."""
    images = any(isinstance(source, ImageFolderData | Cifar10Data) for _, source in leaf_sources("data", data))
    return "images" if images else "tokens"
