"""`data`, `val_data`, `test_data`: what to train and measure on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, PositiveFloat, Tag, model_validator

from plait.config.base import Many, NonNegativeInt, PathText, PositiveInt, RefusedError, Section, Size
from plait.config.objective import MaskedImageObjective, ObjectiveConfig
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
    objective: ObjectiveConfig | None = None
    """What is learned from the text. Absent: that of `data`, and there the next token."""


class TokensData(_Loading):
    """A token memmap that `plait.data.TokenWriter` wrote."""

    builds = "plait.data.sources:token_file"

    type: Literal["tokens"] = "tokens"
    path: PathText
    tokenizer: PathText | None = None
    """The `tokenizer.json` that made the tokens, for objectives that add special tokens."""
    seq_len: Size = 1024
    document_mask: bool = True
    split: Literal["all", "train", "val"] = "all"
    val_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    objective: ObjectiveConfig | None = None
    """What is learned from the text. Absent: that of `data`, and there the next token."""


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


Channels = Annotated[Many[float], Field(min_length=3, max_length=3)]
"""A number for each of red, green and blue."""
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class _Pixels(Section):
    size: Size = 224
    """Side of the square that images are cut to, in pixels."""
    mean: Channels = IMAGENET_MEAN
    """Mean of each channel, for normalization: that of ImageNet, or what the pretrained model was trained with."""
    std: Annotated[Many[PositiveFloat], Field(min_length=3, max_length=3)] = IMAGENET_STD
    """Standard deviation of each channel."""


class _Labeled(Section):
    tokenizer: PathText
    """The model's `tokenizer.json`."""
    truncate: bool = False
    """Cut texts that are longer than `seq_len`. Without it they are refused."""


class TextClassificationData(_Loading, _Labeled):
    """JSON lines with a text, or two, and a label: classes, several of them at once, or a number."""

    builds = "plait.data.labeled:LabeledTexts"

    type: Literal["text_classification"] = "text_classification"
    path: PathText
    """A file, a folder or a glob."""
    text_key: str = "text"
    """The key of the text."""
    pair_key: str | None = None
    """The key of a second text: pairs are classified."""
    label_key: str = "label"
    """The key of the label: a class by its number or name, a list of classes, or a number (regression)."""
    classes: Many[str] = ()
    """The names of the classes, in the order of their numbers. Absent: labels are numbers."""
    seq_len: Size = 512
    """Tokens per row, special tokens included."""


class ImageTextData(_Loading, _Labeled, _Pixels):
    """JSON lines with an image file and a text about it, for contrastive models such as CLIP."""

    builds = "plait.data.labeled:ImageTexts"

    type: Literal["image_text"] = "image_text"
    path: PathText
    """A file, a folder or a glob."""
    image_key: str = "image"
    """The key of the image file, relative to the file that names it."""
    text_key: str = "text"
    """The key of the text."""
    seq_len: Size = 77
    """Tokens per text, special tokens included."""


class SpeechData(_Loading, _Labeled):
    """JSON lines with an audio file (`.wav`) and what is said in it, for models such as Whisper."""

    builds = "plait.data.speech:Speech"

    type: Literal["speech"] = "speech"
    path: PathText
    """A file, a folder or a glob."""
    audio_key: str = "audio"
    """The key of the audio file, relative to the file that names it."""
    text_key: str = "text"
    """The key of the transcript, or of its translation."""
    seq_len: Size = 448
    """Tokens per text, special tokens included."""
    seconds: PositiveFloat = 30.0
    """Length of the model's input. Shorter sound is padded with silence; longer sound is refused."""
    sampling_rate: PositiveInt = 16000
    """Samples per second: of the model and of the files."""
    mel_bins: Size = 80
    """Bands of the log-mel spectrogram."""


class ImageChatData(_Loading):
    """JSON lines with a prompt, a completion and images, for vision-language models such as LLaVA, Qwen-VL, Gemma 3."""

    builds = "plait.data.image_chat:ImageChats"

    type: Literal["image_chat"] = "image_chat"
    path: PathText
    """A file, a folder or a glob."""
    processor: PathText
    """The model's folder, with the files of its `transformers` processor."""
    image_key: str = "image"
    """The key of an image file, or a list of them, relative to the file that names them."""
    prompt_key: str = "prompt"
    """The key of the prompt, which is not trained on. The chat template puts the images before it."""
    completion_key: str = "completion"
    """The key of the answer, which is trained on."""
    seq_len: Size = 1024
    """Tokens per row, those of images included. Longer rows are refused."""


class ImageFolderData(_Loading, _Pixels):
    """`path/class_name/*.png|jpg`."""

    builds = "plait.data.sources:image_folder"

    type: Literal["image_folder"] = "image_folder"
    path: PathText
    augment: bool | None = None
    """Random crop and flip. Absent: yes for training."""
    objective: MaskedImageObjective | None = None
    """Absent: the class. `masked_image`: hidden patches."""


class Cifar10Data(_Loading):
    """CIFAR-10 in its published binary or Python form."""

    builds = "plait.data.sources:cifar10"

    type: Literal["cifar10"] = "cifar10"
    path: PathText
    split: Literal["train", "test"] = "train"
    augment: bool | None = None
    objective: MaskedImageObjective | None = None
    """Absent: the class. `masked_image`: hidden patches."""


class ImportedData(ImportedPart, _Loading):
    """The older form of a custom data set: `target: my_module:make_dataset`."""


class CustomData(_Loading, CustomPart):
    """A custom data set: a class or function that makes it, called with the further keys."""

    plugin_kind = "data"
    builtin = (
        "tokens",
        "text",
        "jsonl",
        "text_classification",
        "image_text",
        "speech",
        "image_chat",
        "image_folder",
        "cifar10",
        "mixture",
        "import",
    )


CUSTOM_DATA = (ImportedData, CustomData)
"""The sections of custom data, of which nothing is known before it is built."""

DataSource = Annotated[
    Annotated[
        Annotated[
            TokensData
            | TextData
            | JsonlData
            | TextClassificationData
            | ImageTextData
            | SpeechData
            | ImageChatData
            | ImageFolderData
            | Cifar10Data
            | ImportedData,
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
            TokensData
            | TextData
            | JsonlData
            | TextClassificationData
            | ImageTextData
            | SpeechData
            | ImageChatData
            | ImageFolderData
            | Cifar10Data
            | ImportedData
            | MixtureData,
            Field(discriminator="type"),
        ],
        Tag(BUILTIN_TAG),
    ]
    | Annotated[CustomData, Tag(CUSTOM_TAG)],
    Discriminator(builtin_or_custom(CustomData)),
]


TEXT_DATA = (TokensData, TextData, JsonlData)
"""The sections of tokenized text, which have objectives."""
IMAGE_DATA = (ImageFolderData, Cifar10Data)
"""The sections of images with classes."""


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
    images = any(isinstance(source, (*IMAGE_DATA, ImageTextData)) for _, source in leaf_sources("data", data))
    return "images" if images else "tokens"
