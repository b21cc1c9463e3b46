"""What every section of a run description has in common."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    WrapValidator,
    model_validator,
)

from plait.config.text import show
from plait.config.trust import keep_origin
from plait.errors import ConfigError

T = TypeVar("T")
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
MAX_NAME_BYTES = 255
"""Bytes of one file's or folder's name, on the file systems that are in use."""
MAX_COUNT = 2**63 - 1
"""What torch and numpy count with: a larger number would end in an error of theirs, in the middle of a run."""
MAX_SIZE = 2**28
"""Of one dimension: a matrix with two such has a number of bytes that can be counted, so that a plan can refuse it."""


def _whole(value: Any) -> Any:
    """`1e5` is a float to every reader, and a fine count all the same."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _at_most(bound: int) -> Callable[[int], int]:
    """No `Field(le=…)`, which the reference would repeat at every key: nobody comes near who means what he writes."""

    def check(value: int) -> int:
        if value > bound:
            raise RefusedError(f"expected at most {bound}, found {show(value)}", "Look for a digit or a unit too many.")
        return value

    return check


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _named(value: str) -> str:
    """With home folder and variables spelled out, once for all who open it.

    Empty text would be the current folder to them, and a variable that is not set a folder of that name.
    """
    if not value.strip():
        remedy = "Give a path, or leave the key out; `.` is this folder."
        raise RefusedError(f"{value!r} names no file or folder", remedy)
    longest = max(value.split("/"), key=lambda name: len(os.fsencode(name)))
    if (size := len(os.fsencode(longest))) > MAX_NAME_BYTES:
        raise RefusedError(
            f"the name {longest[:20]}… in it has {size} bytes", f"Systems take {MAX_NAME_BYTES} at most."
        )
    if "\0" in value:
        raise RefusedError(f"{value!r} has a null character in it", "Leave that out: no path has one.")
    expanded = os.path.expandvars(os.path.expanduser(value))
    if (unset := _VARIABLE.search(expanded)) is not None:
        remedy = "Set it, or write the path out."
        raise RefusedError(f"{value!r} names the variable {unset[0]}, which is not set", remedy)
    return expanded


def _target(value: str) -> str:
    module, separator, name = value.partition(":")
    if module and separator and name:
        return value
    before, _, last = value.rstrip(":").rpartition(".")
    wanted = f"{before}:{last}" if before and last else "my_package.my_module:MyClass"
    raise RefusedError(f"{value!r} does not say what is to be taken from which module", f"Write it as {wanted}.")


PositiveInt = Annotated[int, Field(gt=0), BeforeValidator(_whole), AfterValidator(_at_most(MAX_COUNT))]
NonNegativeInt = Annotated[int, Field(ge=0), BeforeValidator(_whole), AfterValidator(_at_most(MAX_COUNT))]
Size = Annotated[PositiveInt, AfterValidator(_at_most(MAX_SIZE))]
"""One dimension of a tensor."""
PathText = Annotated[str, BeforeValidator(_path), AfterValidator(_named)]
"""A path as text; a `pathlib.Path` given from Python becomes text, `~` the home folder, `$NAME` its value."""
Target = Annotated[str, AfterValidator(_target), WrapValidator(keep_origin)]
"""Something of the user's own: `module:attribute`; see [Note: whose names become code] in `plait.config.trust`."""
Many = Annotated[tuple[T, ...], Strict(False)]
"""Any number of values. Files know only lists, so a list is welcome although sections are strict."""
Pair = Annotated[tuple[T, T], Strict(False)]


if TYPE_CHECKING:
    Refusing = BaseModel
else:

    class _Constructor(type(BaseModel)):
        def __call__(cls, /, *args, **keys):
            try:
                return super().__call__(*args, **keys)
            except ValidationError as error:
                from plait.config.explain import explain_section

                name = cls.__name__.removesuffix("Config")
                problems = explain_section(error, cls, "", "keyword")
                raise ConfigError(
                    [replace(problem, path=f"{name}.{problem.path}" if problem.path else name) for problem in problems]
                ) from None

    class Refusing(BaseModel, metaclass=_Constructor):
        """Refuses a section that is written as an object as one in a file is refused, by the same messages.

        Sections inside of another are not made by calling their class, so each refusal is reported once.
        """


class Section(Refusing):
    """Frozen, so nothing below can change it; closed, so a misspelt key is an error.

    Strict, so `true` is no number and `"4"` no count; a class is built at its first use, so importing is cheap.
    """

    builds: ClassVar[str] = ""
    """`package.module:name` of what makes the part that the section describes; see `plait.plugins`."""

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
