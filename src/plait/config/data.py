"""`data`, `val_data`, `test_data`: what to train and measure on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from plait.config.base import Section


class _Loading(Section):
    shuffle: bool | None = None
    """Absent: yes for training, no for validation and test."""
    workers: NonNegativeInt = 0
    """Processes that load ahead of training."""
    pin_memory: bool | None = None
    """Absent: when training on CUDA."""
    drop_last: bool = False
    """Leave out the last, smaller batch of an epoch."""


class _Text(_Loading):
    tokenizer: str | None = None
    """A `tokenizer.json`. Absent: a byte-level BPE is trained on the text itself."""
    vocab_size: PositiveInt = 4096
    """Size of the BPE when one is trained; a given tokenizer has its own."""
    seq_len: PositiveInt = 1024
    document_mask: bool = True
    """Tokens attend within their own document only."""
    split: Literal["all", "train", "val"] = "all"
    """`train` and `val` are the two parts of one source, cut by document."""
    val_fraction: float = Field(0.05, gt=0.0, lt=1.0)
    cache: str | None = None
    """Folder for the tokenized files. Absent: `plait` in the user's cache folder."""


class TokensData(_Loading):
    """A token memmap that was written before."""

    type: Literal["tokens"] = "tokens"
    path: str
    seq_len: PositiveInt = 1024
    document_mask: bool = True
    split: Literal["all", "train", "val"] = "all"
    val_fraction: float = Field(0.05, gt=0.0, lt=1.0)


class TextData(_Text):
    """Plain text files, packed into sequences."""

    type: Literal["text"] = "text"
    path: str
    """A file, a folder, a glob, or `stdlib`: the Python standard library's own sources."""


class JsonlData(_Text):
    """One JSON object a line: whole texts, or prompts with completions (only those are trained on)."""

    type: Literal["jsonl"] = "jsonl"
    path: str
    text_key: str | None = None
    prompt_key: str | None = None
    completion_key: str | None = None


class ImageFolderData(_Loading):
    """`path/class_name/*.png|jpg`."""

    type: Literal["image_folder"] = "image_folder"
    path: str
    size: PositiveInt = 224
    augment: bool | None = None
    """Random crop and flip. Absent: yes for training."""


class Cifar10Data(_Loading):
    """CIFAR-10 in its published binary or Python form."""

    type: Literal["cifar10"] = "cifar10"
    path: str
    split: Literal["train", "test"] = "train"
    augment: bool | None = None


class ImportedData(_Loading):
    """A torch Dataset of the user's own: `target: my_module:make_dataset`."""

    type: Literal["import"] = "import"
    target: str
    args: dict[str, Any] = Field(default_factory=dict)


DataConfig = Annotated[
    TokensData | TextData | JsonlData | ImageFolderData | Cifar10Data | ImportedData,
    Field(discriminator="type"),
]
