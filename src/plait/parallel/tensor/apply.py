"""Tensor and sequence parallelism: applying a plan to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from plait.errors import ConfigError, ModelError, Problem
from plait.parallel.hf import is_transformers_model
from plait.parallel.tensor.async_tp import enable_async
from plait.parallel.tensor.dropout import OwnRandom
from plait.parallel.tensor.linear import is_linear
from plait.parallel.tensor.parameters import Placed
from plait.parallel.tensor.plan import WORDS, check_sequence_plan, outer, read_plan
from plait.parallel.tensor.style import PLAN_KEY, Site, Style
from plait.parallel.tensor.transformers_plan import transformers_words
from plait.parallel.tensor.vocabulary import answer_whole


def apply_tensor_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, str] | None = None,
    sequence: bool = False,
    async_tp: bool = False,
    stage: bool = False,
) -> None:
    """Share the work of a model's layers among the ranks of a 1-D mesh, in place.

    `plan` gives words (see `plan.WORDS`) to patterns of module names; absent, it is the model's own `tensor_plan()`,
    or made from the plan of `transformers`. `sequence` splits activations along the sequence between the regions.
    `stage`: the module is a part of the model the plan was written for, so patterns may match nothing.

    Works on the meta device and on real ones; where parameters have values, all ranks must have the same. Afterwards
    parameters that are split, or whose gradients are summed over ranks, are DTensors on `mesh`; the others are plain
    and, like their gradients, the same on every rank. Names do not change. Input and answer of the model are whole
    and the same on every rank of the mesh; so is the loss, which must not be summed over it.
    """
    assert mesh.ndim == 1, "tensor parallelism goes along one mesh axis"
    if async_tp:
        enable_async(mesh, sequence=sequence)
    if mesh.size() == 1:
        return
    words = words_of(module, plan, stage=stage)
    if sequence and not stage:
        check_sequence_plan(words)
    placed, random = Placed(mesh), dict[str, OwnRandom]()
    styles = {name: _style(name, module, words, mesh, placed, random, sequence=sequence) for name in words}
    problems = [problem for style in styles.values() for problem in style.problems()]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    parallelize_module(module, mesh, dict(styles), src_data_rank=None)
    loose = list(placed.left_behind(module))
    if loose:
        raise ConfigError(
            Problem(
                PLAN_KEY,
                f"{', '.join(loose)} shares its tensor with a layer of the plan, and has no word itself",
                "Give both the same kind of word, such as vocab_embedding and vocab_head.",
            )
        )
    if any(words[name] == "vocab_head" and is_linear(module.get_submodule(name)) for name in words):
        answer_whole(module)


def words_of(module: nn.Module, plan: Mapping[str, str] | None = None, *, stage: bool = False) -> dict[str, str]:
    """The word of each module that takes part, by name; from the given plan, or the model's, or `transformers`'."""
    if plan is not None:
        return read_plan(module, plan, stage=stage)
    declared = getattr(module, "tensor_plan", None)
    if callable(declared):
        return read_plan(module, declared(), stage=True)
    if is_transformers_model(module):
        return transformers_words(module)
    raise ModelError(
        f"nothing says how the ranks share the layers of a {type(module).__name__}: give it a method `tensor_plan()`, "
        f"write a plan as {PLAN_KEY}, or use layout.tp: 1"
    )


def stays_whole(
    module: nn.Module, plan: Mapping[str, str] | None = None, *, sequence: bool = False, stage: bool = False
) -> Callable[[str], bool]:
    """Whether a plan keeps experts, by the name of what holds them, whole on purpose, so that all ranks have them all.

    That is `replicate`, for the module or for one around it. Experts that ranks share must see the same tokens on each
    of them, so where `sequence` splits these the answer is an error. To be asked for before the plan is applied.
    """
    words = words_of(module, plan, stage=stage)

    def answer(name: str) -> bool:
        def within(word: str) -> bool:
            return words.get(name) == word or outer(name, words, word) is not None

        if not within("replicate") and sequence and within("block") and not within("whole_sequence"):
            message = f"{name!r} holds experts, which need all tokens, in a block where the sequence is split"
            raise ConfigError(Problem(PLAN_KEY, message, "Give the mixture around them the word `whole_sequence`."))
        return within("replicate")

    return answer


def _style(
    name: str,
    model: nn.Module,
    words: dict[str, str],
    mesh: DeviceMesh,
    placed: Placed,
    random: dict[str, OwnRandom],
    *,
    sequence: bool,
) -> Style:
    site = Site(
        name=name,
        module=model.get_submodule(name),
        parent=model.get_submodule(name.rpartition(".")[0]),
        words=words,
        mesh=mesh,
        group=mesh.get_group(),
        size=mesh.size(),
        rank=mesh.get_local_rank(),
        placed=placed,
        sequence=sequence,
        split=sequence and outer(name, words, "block") is not None and outer(name, words, "whole_sequence") is None,
        region=outer(name, words, "region"),
        random=random,
    )
    return WORDS[words[name]](site)
