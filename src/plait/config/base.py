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
"""The limit of usual file systems for the name of one file or folder."""
MAX_COUNT = 2**63 - 1
"""The largest int64, as torch and numpy use: a larger number would fail in the middle of a run."""
MAX_SIZE = 2**28
"""The largest dimension: bytes of a matrix with two such still fit an int64, so that a plan can refuse it."""


def _whole(value: Any) -> Any:
    """Return a float without a fraction as an integer, as parsers read `1e5` as a float; other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _at_most(bound: int) -> Callable[[int], int]:
    """Return a validator for an upper bound. `Field(le=…)` is not used, as the reference would show it at every key."""

    def check(value: int) -> int:
        if value > bound:
            raise RefusedError(f"expected at most {bound}, found {show(value)}", "Look for a digit or a unit too many.")
        return value

    return check


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _named(value: str) -> str:
    """Return a path with the home folder and environment variables expanded.

    Raise an error for empty text, which would mean the current folder, and for variables that are not set.
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
        raise RefusedError(f"{value!r} has a null character in it", "Remove it.")
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
    raise RefusedError(f"{value!r} is not of the form package.module:name", f"Write it as {wanted}.")


PositiveInt = Annotated[int, Field(gt=0), BeforeValidator(_whole), AfterValidator(_at_most(MAX_COUNT))]
NonNegativeInt = Annotated[int, Field(ge=0), BeforeValidator(_whole), AfterValidator(_at_most(MAX_COUNT))]
Size = Annotated[PositiveInt, AfterValidator(_at_most(MAX_SIZE))]
"""One dimension of a tensor."""
PathText = Annotated[str, BeforeValidator(_path), AfterValidator(_named)]
"""A path as text; a `pathlib.Path` given from Python becomes text, `~` the home folder, `$NAME` its value."""
Target = Annotated[str, AfterValidator(_target), WrapValidator(keep_origin)]
"""User code as `module:attribute`; see [Note: whose names become code] in `plait.config.trust`."""
Many = Annotated[tuple[T, ...], Strict(False)]
"""Any number of values. A list is accepted too, although sections are strict: files have lists only."""
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
        """Raises `ConfigError` for a section that is made in Python, with the messages for one in a file.

        Sections inside another are not made by calling their class, so each error is reported once.
        """


class Section(Refusing):
    """The base of all sections: frozen; closed, so a misspelt key is an error; strict, so `"4"` is not a number.

    A class is built at its first use, so that importing is cheap.
    """

    builds: ClassVar[str] = ""
    """`package.module:name` of the function that builds what the section describes; see `plait.plugins`."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        defer_build=True,
    )


class RefusedError(ValueError):
    """A value that a section refuses, with what to write instead."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message}. {remedy}")
        self.message, self.remedy = message, remedy


class Shorthand(Section):
    """A section that can be written shorter than with all its keys."""

    @classmethod
    @abstractmethod
    def expand(cls, value: Any) -> Any:
        """Return the keys that `value` is short for; other values are returned as they are.

        Raises `RefusedError` for an unknown word.
        """

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return cls.expand(value)
