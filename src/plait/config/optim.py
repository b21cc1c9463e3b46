"""`optim`: how parameters are updated. Each optimizer has a closed section, so none takes a key that it ignores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, NonNegativeFloat, PositiveFloat, Strict, Tag

from plait.config.base import Many, Pair, PositiveInt, Section
from plait.config.part import BUILTIN_TAG, CUSTOM_TAG, CustomPart, builtin_or_custom

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class _Optim(Section):
    no_decay: Many[str] = ("bias", "norm")
    """Parameters without weight decay: `bias`, `norm`, `embedding`, or a pattern of names (`*.gate.*`)."""

    @property
    def moments(self) -> float:
        """Optimizer states per parameter of a matrix."""
        return 2.0


class _BuiltinOptim(_Optim):
    elementwise: ClassVar[bool] = True
    """Whether each element is updated by itself, so that a shard of a parameter is enough. Plait's other optimizers get
    DTensors, and communicate themselves."""

    lr: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0


class _Implemented(_BuiltinOptim):
    implementation: Literal["auto", "fused", "foreach", "loop"] = "auto"
    """`auto`: fused where the device has it."""


class _Adam(_BuiltinOptim):
    builds = "plait.optim.optimizers:adam"

    implementation: Literal["auto", "one-pass", "fused", "foreach", "loop"] = "auto"
    """`one-pass`: Plait's kernel, which also rounds the new weights; `fused`: torch's. `auto`: the first of these that
    supports the device."""
    amsgrad: bool = False

    @property
    def moments(self) -> float:
        """Two, or three with `amsgrad`."""
        return 3.0 if self.amsgrad else 2.0


class AdamWConfig(_Adam):
    """Adam with decoupled weight decay."""

    type: Literal["AdamW"] = "AdamW"
    weight_decay: NonNegativeFloat = 0.01
    betas: Pair[Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


class AdamConfig(_Adam):
    """Adam; weight decay is added to the gradient."""

    type: Literal["Adam"] = "Adam"
    betas: Pair[Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


class AdamW8bitConfig(_BuiltinOptim):
    """AdamW with 8-bit moments, in blocks of 256 with one scale each."""

    builds = "plait.optim.adam8bit:AdamW8bit.from_config"

    type: Literal["AdamW8bit"] = "AdamW8bit"
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay, decoupled from the gradient."""
    betas: Pair[Fraction] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""


class SGDConfig(_Implemented):
    """Stochastic gradient descent, with momentum if asked."""

    builds = "plait.optim.optimizers:sgd"

    type: Literal["SGD"] = "SGD"
    lr: PositiveFloat = 0.1
    momentum: Fraction = 0.0
    nesterov: bool = False

    @property
    def moments(self) -> float:
        """The momentum."""
        return 1.0 if self.momentum else 0.0


class AdagradConfig(_Implemented):
    """Adagrad."""

    builds = "plait.optim.optimizers:adagrad"

    type: Literal["Adagrad"] = "Adagrad"
    lr: PositiveFloat = 1e-2
    lr_decay: NonNegativeFloat = 0.0
    eps: PositiveFloat = 1e-10

    @property
    def moments(self) -> float:
        """The sum of squares."""
        return 1.0


class LionConfig(_BuiltinOptim):
    """Lion: the sign of an interpolated momentum."""

    builds = "plait.optim.lion:Lion.from_config"

    type: Literal["Lion"] = "Lion"
    lr: PositiveFloat = 1e-4
    betas: Pair[Fraction] = (0.9, 0.99)

    @property
    def moments(self) -> float:
        """The momentum."""
        return 1.0


class LambConfig(_BuiltinOptim):
    """LAMB: Adam with a trust ratio for each parameter."""

    builds = "plait.optim.lamb:Lamb.from_config"
    elementwise = False

    type: Literal["Lamb"] = "Lamb"
    weight_decay: NonNegativeFloat = 0.01
    betas: Pair[Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-6
    max_trust: PositiveFloat = 10.0
    min_trust: NonNegativeFloat = 0.0


class AdafactorConfig(_BuiltinOptim):
    """Adafactor: second moments as a row and a column."""

    builds = "plait.optim.adafactor:Adafactor.from_config"
    elementwise = False

    type: Literal["Adafactor"] = "Adafactor"
    lr: PositiveFloat = 1e-2
    beta2_decay: Annotated[float, Field(lt=0.0)] = -0.8
    eps: Annotated[tuple[NonNegativeFloat | None, NonNegativeFloat], Strict(False)] = (None, 1e-3)
    clip_threshold: PositiveFloat = 1.0

    @property
    def moments(self) -> float:
        """A row and a column are negligible."""
        return 0.0


class MuonConfig(_BuiltinOptim):
    """Muon for hidden matrices; AdamW, at `adam_lr`, for everything else."""

    builds = "plait.optim.muon:Muon.from_config"
    elementwise = False

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
    """Matrices that AdamW updates nevertheless."""

    @property
    def moments(self) -> float:
        """The momentum."""
        return 1.0


class CustomOptim(_Optim, CustomPart):
    """A custom optimizer, called with parameter groups, `lr` where it is given, and the further keys.

    Other classes of `torch.optim` than those above may be given by name, short for `torch.optim:Name`.
    """

    plugin_kind = "optimizer"
    builtin = ("AdamW", "Adam", "AdamW8bit", "SGD", "Adagrad", "Lion", "Lamb", "Adafactor", "Muon")
    aliases: ClassVar[Mapping[str, str]] = {
        name: f"torch.optim:{name}"
        for name in ("ASGD", "Adadelta", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SparseAdam")
    }

    lr: PositiveFloat | None = None
    """Learning rate. Absent: the optimizer's default."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay; with it, or with `no_decay`, there are two parameter groups. Absent: one group, with the
    optimizer's default."""
    elementwise: bool | None = None
    """Whether each element is updated by itself, so that a shard of a parameter is enough. Absent: the attribute
    `elementwise` of the class, known for torch's optimizers; false for others, which get full parameters."""


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
        Tag(BUILTIN_TAG),
    ]
    | Annotated[CustomOptim, Tag(CUSTOM_TAG)],
    Discriminator(builtin_or_custom(CustomOptim)),
]
