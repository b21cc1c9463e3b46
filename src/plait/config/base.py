"""What every section of a run description has in common."""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator

T = TypeVar("T")


def _whole(value: Any) -> Any:
    """`1e5` is a float to every reader, and a fine count all the same."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _named(value: str) -> str:
    """With the home folder spelled out, once for all who open it. Empty text would be the current folder to them."""
    if value.strip():
        return os.path.expanduser(value)
    raise RefusedError(f"{value!r} names no file or folder", "Give a path, or leave the key out; `.` is this folder.")


def _target(value: str) -> str:
    module, separator, name = value.partition(":")
    if module and separator and name:
        return value
    before, _, last = value.rstrip(":").rpartition(".")
    wanted = f"{before}:{last}" if before and last else "my_package.my_module:MyClass"
    raise RefusedError(f"{value!r} does not say what is to be taken from which module", f"Write it as {wanted}.")


PositiveInt = Annotated[int, Field(gt=0), BeforeValidator(_whole)]
NonNegativeInt = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
PathText = Annotated[str, BeforeValidator(_path), AfterValidator(_named)]
"""A path as text; a `pathlib.Path` given from Python becomes text, and `~` the home folder."""
Target = Annotated[str, AfterValidator(_target)]
"""Something of the user's own: `module:attribute`."""
Many = Annotated[tuple[T, ...], Strict(False)]
"""Any number of values. Files know only lists, so a list is welcome although sections are strict."""
Pair = Annotated[tuple[T, T], Strict(False)]


class Section(BaseModel):
    """Frozen, so nothing below can change it; closed, so a misspelt key is an error.

    Strict, so `true` is no number and `"4"` no count; a class is built at its first use, so importing is cheap.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        defer_build=True,
    )


class RefusedError(ValueError):
    """A value that a section cannot take, with what to write instead."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message}. {remedy}")
        self.message, self.remedy = message, remedy


class Shorthand(Section):
    """A section that can be written shorter than with all its keys."""

    @classmethod
    @abstractmethod
    def expand(cls, value: Any) -> Any:
        """The keys that `value` is short for; a value that is not short for anything comes back as it is.

        Raises `RefusedError` for a word that means nothing here.
        """

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return cls.expand(value)
