"""`data.objective`: what a model learns from plain text or images, and what is hidden from it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from plait.config.base import RefusedError, Section, Size
from plait.config.part import BUILTIN_TAG, CUSTOM_TAG, CustomPart, builtin_or_custom

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Probability = Annotated[float, Field(gt=0.0, lt=1.0)]


class MaskedObjective(Section):
    """Masked words, as for BERT: some tokens are predicted from both sides (`model.task: masked-lm`)."""

    builds = "plait.data.objectives:Masked"

    type: Literal["masked"] = "masked"
    probability: Probability = 0.15
    """The share of tokens (or of words) that are predicted. BERT: 0.15, ModernBERT: 0.3."""
    mask_share: Share = 0.8
    """The share of those that are replaced by the mask token."""
    random_share: Share = 0.1
    """The share of those that are replaced by a random token; the rest stay as they are."""
    whole_words: bool = False
    """Choose words, with all of their tokens, and not single tokens."""

    @model_validator(mode="after")
    def _shares(self) -> MaskedObjective:
        if self.mask_share + self.random_share > 1.0:
            message = f"mask_share {self.mask_share:g} and random_share {self.random_share:g} are more than 1 together"
            raise RefusedError(message, "Write smaller ones: together they are a share of the predicted tokens.")
        return self


class _Spans(Section):
    probability: Probability = 0.15
    """The share of tokens that are hidden."""
    mean_span_length: Annotated[float, Field(ge=1.0)] = 3.0
    """Mean number of tokens of a hidden span."""


class SpanCorruptionObjective(_Spans):
    """Span corruption, as for T5: the decoder writes the hidden spans, each after its sentinel token
    (`model.task: seq2seq-lm`)."""

    builds = "plait.data.objectives:SpanCorruption"

    type: Literal["span_corruption"] = "span_corruption"


class DenoisingObjective(_Spans):
    """Text infilling, as for BART: each hidden span is one mask token, and the decoder writes the whole text
    (`model.task: seq2seq-lm`)."""

    builds = "plait.data.objectives:Denoising"

    type: Literal["denoising"] = "denoising"
    probability: Probability = 0.3
    """The share of tokens that are hidden."""


class Seq2SeqObjective(Section):
    """Text to text, such as translations and summaries: the encoder reads the prompt, the decoder writes the completion
    (`model.task: seq2seq-lm`)."""

    builds = "plait.data.objectives:TextToText"

    type: Literal["seq2seq"] = "seq2seq"
    target_len: Size | None = None
    """The most tokens of a completion, special tokens included. Absent: `seq_len`, which is that of prompts."""
    truncate: bool = False
    """Cut longer texts. Without it they are refused."""


class MaskedImageObjective(Section):
    """Masked image modelling, as in SimMIM: the pixels of hidden patches (`model.task: masked-image-modeling`)."""

    builds = "plait.data.images:MaskedPatches"

    type: Literal["masked_image"] = "masked_image"
    probability: Probability = 0.6
    """The share of patches that are hidden."""
    patch_size: Size = 16
    """The side of the model's patches, in pixels."""
    mask_patch_size: Size | None = None
    """The side of what is hidden as one, a multiple of `patch_size`. Absent: `patch_size`."""

    @property
    def hidden_side(self) -> int:
        """The side of what is hidden as one."""
        return self.mask_patch_size or self.patch_size


class CustomObjective(CustomPart):
    """A custom objective: called with `tokenizer`, `seq_len` and the further keys, it returns a function from the
    tokens of a row and a NumPy random generator to the row's inputs of the model."""

    plugin_kind = "objective"
    builtin = ("masked", "span_corruption", "denoising", "seq2seq")


ObjectiveConfig = Annotated[
    Annotated[
        Annotated[
            MaskedObjective | SpanCorruptionObjective | DenoisingObjective | Seq2SeqObjective,
            Field(discriminator="type"),
        ],
        Tag(BUILTIN_TAG),
    ]
    | Annotated[CustomObjective, Tag(CUSTOM_TAG)],
    Discriminator(builtin_or_custom(CustomObjective)),
]
