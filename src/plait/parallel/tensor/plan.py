"""From a plan, which gives words to patterns of module names, to one word for each module."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

from torch import nn

from plait.config import TensorPlanPart, choose
from plait.errors import ConfigError, Problem
from plait.parallel.tensor.linear import Colwise, ColwiseGather, Heads, KvHeads, QkvHeads, Rowwise, RowwiseSplit
from plait.parallel.tensor.sequence import Block, Inner, Region, Sequence, WholeSequence
from plait.parallel.tensor.style import PLAN_KEY, SEQUENCE_KEY, Style
from plait.parallel.tensor.vocabulary import VocabEmbedding, VocabHead
from plait.plugins import call, load


class Whole(Style):
    """A module that stays whole, with everything in it: every rank does all of its work."""

    def place(self) -> None:
        """There is nothing to do; the word only says that it was thought of."""


WORDS: Mapping[str, type[Style]] = MappingProxyType(
    {
        "colwise": Colwise,
        "colwise_gather": ColwiseGather,
        "rowwise": Rowwise,
        "rowwise_split": RowwiseSplit,
        "heads": Heads,
        "kv_heads": KvHeads,
        "qkv_heads": QkvHeads,
        "vocab_embedding": VocabEmbedding,
        "vocab_head": VocabHead,
        "region": Region,
        "inner": Inner,
        "block": Block,
        "sequence": Sequence,
        "whole_sequence": WholeSequence,
        "replicate": Whole,
    }
)
"""What each word of a plan does to its module."""


def read_plan(model: nn.Module, plan: Mapping[str, str], *, stage: bool = False) -> dict[str, str]:
    """The word of each module that a pattern names, in the order of the model.

    A pattern is a module name of which each part may have wildcards: `blocks.*.ffn.up`. One that matches nothing is
    an error, unless the model is a `stage`, a part of the model that the plan was written for.
    """
    problems: list[Problem] = []
    found: dict[str, dict[str, str]] = {}
    names = [name for name, _ in model.named_modules() if name]
    for pattern, word in plan.items():
        if word not in WORDS:
            problems.append(Problem(f"{PLAN_KEY}.{pattern}", f"unknown word {word!r}", choose(word, WORDS, "word")))
            continue
        matched = [name for name in names if matches(name, pattern)]
        if not matched and not stage:
            problems.append(Problem(PLAN_KEY, f"{pattern!r} matches no module", _examples(names)))
        for name in matched:
            found.setdefault(name, {})[pattern] = word
    for name, words in found.items():
        if len(set(words.values())) > 1:
            said = " and ".join(f"{pattern!r} says {word}" for pattern, word in words.items())
            problems.append(
                Problem(PLAN_KEY, f"two patterns disagree about {name!r}: {said}", "Let one of them match.")
            )
    if problems:
        raise ConfigError(problems)
    return {name: next(iter(found[name].values())) for name in names if name in found}


def plan_of(plan: dict[str, str] | TensorPlanPart, model: nn.Module) -> Mapping[str, str] | None:
    """The plan that `strategy.tensor.plan` says, or makes of the model; None where it says nothing."""
    if not isinstance(plan, TensorPlanPart):
        return plan or None
    made = call(load(plan, PLAN_KEY), PLAN_KEY, model, name=str(plan), arguments=plan.arguments)
    if not isinstance(made, Mapping) or not all(isinstance(each, str) for pair in made.items() for each in pair):
        message = f"{str(plan)!r} returned a {type(made).__name__}, and patterns with words were expected"
        raise ConfigError(Problem(PLAN_KEY, message, "Return {'layers.*.mlp.up': 'colwise', …}."))
    return made


def matches(name: str, pattern: str) -> bool:
    """Whether a module name fits a pattern, part by part: a wildcard never reaches over a dot."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def check_sequence_plan(words: Mapping[str, str]) -> None:
    """Sequence parallelism begins and ends at blocks, so a plan has to name them."""
    if "block" not in words.values():
        raise ConfigError(
            Problem(
                SEQUENCE_KEY,
                "the tensor plan names no `block`, so nothing says where the sequence may be split",
                "Give the repeated layers the word `block` and their norms the word `sequence`.",
            )
        )


def outer(name: str, words: Mapping[str, str], word: str) -> str | None:
    """The innermost module around another that has a word, if any."""
    while name := name.rpartition(".")[0]:
        if words.get(name) == word:
            return name
    return None


def _examples(names: list[str]) -> str:
    shown = list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names))
    return f"there are: {', '.join(shown[:24])}{', …' if len(shown) > 24 else ''}"
