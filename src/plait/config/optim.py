"""`optim`: how parameters are updated. One closed section an optimizer, so none takes a key it ignores."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, NonNegativeFloat, PositiveFloat, Strict, Tag

from plait.config.base import Many, Pair, PositiveInt, Section
from plait.config.part import OWN_TAG, PART_TAG, Part, own_or_part

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class _Optim(Section):
    lr: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0
    no_decay: Many[str] = ("bias", "norm")
    """Parameters without weight decay: `bias`, `norm`, `embedding`, or a pattern of names (`*.gate.*`)."""


class _Implemented(_Optim):
    implementation: Literal["auto", "fused", "foreach", "loop"] = "auto"
    """`auto`: fused where the device has it."""


class _Adam(_Optim):
    implementation: Literal["auto", "one-pass", "fused", "foreach", "loop"] = "auto"
    """`one-pass`: Plait's kernel, which rounds the new weights too; `fused`: torch's. `auto`: the first of these that
    is made for the device."""


class AdamWConfig(_Adam):
    """Adam with decoupled weight decay."""

    type: Literal["AdamW"] = "AdamW"
    weight_decay: NonNegativeFloat = 0.01
    betas: Pair[Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    amsgrad: bool = False


class AdamConfig(_Adam):
    """Adam; weight decay is added to the gradient."""

    type: Literal["Adam"] = "Adam"
    betas: Pair[Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    amsgrad: bool = False


class AdamW8bitConfig(_Optim):
    """AdamW whose moments take 8 bits a number, with one scale for 256 of them."""

    type: Literal["AdamW8bit"] = "AdamW8bit"
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay, decoupled from the gradient."""
    betas: Pair[Fraction] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""


class SGDConfig(_Implemented):
    """Stochastic gradient descent, with momentum if asked."""

    type: Literal["SGD"] = "SGD"
    lr: PositiveFloat = 0.1
    momentum: Fraction = 0.0
    nesterov: bool = False


class AdagradConfig(_Implemented):
    """Adagrad."""

    type: Literal["Adagrad"] = "Adagrad"
    lr: PositiveFloat = 1e-2
    lr_decay: NonNegativeFloat = 0.0
    eps: PositiveFloat = 1e-10


class LionConfig(_Optim):
    """Lion: the sign of an interpolated momentum."""

    type: Literal["Lion"] = "Lion"
    lr: PositiveFloat = 1e-4
    betas: Pair[Fraction] = (0.9, 0.99)


class LambConfig(_Optim):
    """LAMB: Adam with a trust ratio for each parameter."""

    type: Literal["Lamb"] = "Lamb"
    weight_decay: NonNegativeFloat = 0.01
    betas: Pair[Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-6
    max_trust: PositiveFloat = 10.0
    min_trust: NonNegativeFloat = 0.0


class AdafactorConfig(_Optim):
    """Adafactor: second moments as a row and a column."""

    type: Literal["Adafactor"] = "Adafactor"
    lr: PositiveFloat = 1e-2
    beta2_decay: Annotated[float, Field(lt=0.0)] = -0.8
    eps: Annotated[tuple[NonNegativeFloat | None, NonNegativeFloat], Strict(False)] = (None, 1e-3)
    clip_threshold: PositiveFloat = 1.0


class MuonConfig(_Optim):
    """Muon for hidden matrices; AdamW, at `adam_lr`, for everything else."""

    type: Literal["Muon"] = "Muon"
    lr: PositiveFloat = 2e-2
    weight_decay: NonNegativeFloat = 0.1
    momentum: Fraction = 0.95
    nesterov: bool = True
    ns_steps: PositiveInt = 5
    adam_lr: PositiveFloat = 3e-4
    adam_betas: Pair[Fraction] = (0.9, 0.95)
    adam_eps: PositiveFloat = 1e-8
    adam_patterns: Many[str] = ("*embed*", "*tok*", "*pos*", "*head*", "*output*")
    """Matrices that go to AdamW all the same."""


class OptimPart(_Optim, Part):
    """An optimizer of one's own, called with parameter groups, `lr` and the further keys."""

    kind = "optimizer"

    elementwise: bool | None = None
    """Whether each number is updated by itself, so that a part of a parameter is enough. Absent: as the class says in
    an attribute `elementwise`, known of torch's own; false for others, which see whole parameters."""


OptimConfig = Annotated[
    Annotated[
        Annotated[
            AdamWConfig
            | AdamConfig
            | AdamW8bitConfig
            | SGDConfig
            | AdagradConfig
            | LionConfig
            | LambConfig
            | AdafactorConfig
            | MuonConfig,
            Field(discriminator="type"),
        ],
        Tag(OWN_TAG),
    ]
    | Annotated[OptimPart, Tag(PART_TAG)],
    Discriminator(own_or_part(OptimPart)),
]
