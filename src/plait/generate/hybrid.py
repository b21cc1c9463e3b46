"""Answers from a policy that is in training, however it is spread.

[Note: ways to write]
`gathered`: every rank collects the whole weights once, in the format that is computed in, and writes alone with them;
all ranks share out the prompts, those along `tp` included. `sharded`: the model stays as it is and gathers its weights
layer by layer for every token, as in training; for models of which no rank could hold the whole. `trainer`: no cache
of keys and values at all, each token by the trainer's own forward pass; slow, and beyond doubt. What an answer is does
not depend on these ways nor on the number of ranks, up to rounding. `vllm`: as `gathered`, but the whole weights go to
an engine of vLLM on every rank, which draws from random numbers of its own; see [Note: what vLLM is asked for].

[Note: memory stays with the allocator]
Whole weights and cache are let go of after writing, and the trainer's next step gets the memory from torch's allocator.
Given back to the device, that memory would have to be asked for again, with everything else that the trainer does not
hold at that moment. Where memory is short, the allocator gives back by itself what is in the way, and so does
`graph.record`, whose memory is apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import psutil
import torch
from torch import Tensor, nn

from plait.config import RunConfig, VllmConfig
from plait.distributed import ConstructionRecord, World, dtensor_like, find_initializer, is_sharded, to_local
from plait.engine import ManualEngine, NativeEngine
from plait.errors import GenerateError, ModelError, RolloutMismatchError
from plait.generate.batch import Decode
from plait.generate.decoder import pad_rows, pad_to_multiple
from plait.generate.generator import Generator, context_of, vocabulary_of
from plait.generate.options import Completion, Sampling, check_prompts
from plait.generate.vllm import VllmGenerator, Weights
from plait.models import Attention, build_model
from plait.precision import make_policy

# A whole copy of a model that is spread over ranks, for as long as it writes.


def full_weights(engine: NativeEngine, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the live model in the format it computes in, gathered one at a time. Every rank must go along.

    Rounded before it is gathered: that is what the trainer computes with, and half of what would be sent.
    """
    device = engine.world.device
    with torch.no_grad(), engine.master_weights.readable():
        for name, param in engine.model.named_parameters():
            shard = to_local(param.detach())
            shard = shard.to(device, dtype if shard.dtype == torch.float32 else shard.dtype)
            whole = dtensor_like(shard, param.detach())
            yield name, whole.full_tensor() if is_sharded(whole) else whole


class Replica:
    """The same module without the parallelism, empty until it is filled.

    Built on the meta device, so that while it is empty it takes no memory; buffers that are not part of the state get
    their values from the model's own initializer, or as its constructor made them.
    """

    def __init__(self, build: Callable[[], nn.Module], dtype: torch.dtype, device: torch.device) -> None:
        with torch.device("meta"), ConstructionRecord() as built:
            self.module = build()
        self._dtype, self._device = dtype, device
        self._holders: dict[str, list[tuple[nn.Module, str]]] = {}
        names: dict[int, str] = {}
        for prefix, module in self.module.named_modules():
            for key, param in module._parameters.items():
                if param is not None:
                    name = names.setdefault(id(param), f"{prefix}.{key}" if prefix else key)
                    self._holders.setdefault(name, []).append((module, key))
        self._make_buffers(built)
        self.module.eval().requires_grad_(False)

    @property
    def bytes(self) -> int:
        """What it takes when it is full."""
        return sum(param.numel() for param in self.module.parameters()) * self._dtype.itemsize

    def fill(self, engine: NativeEngine) -> None:
        """Take the weights that the engine has now. Every rank must call it."""
        missing, params = set(self._holders), dict(engine.model.named_parameters())
        for name, whole in full_weights(engine, self._dtype):
            if name not in self._holders:
                raise ModelError(
                    f"the model in training has {name}, and the one built for writing has not: build it the same way, "
                    "adapters included"
                )
            missing.discard(name)
            # A parameter that is whole already, and in the right format, is copied: it is the trainer's to change.
            is_copy = whole.data_ptr() != to_local(params[name].detach()).data_ptr()
            self._put(name, whole if is_copy else whole.clone())
        if missing:
            raise ModelError(f"the model built for writing has {min(missing)}, and the one in training has not")
        live = dict(engine.model.named_buffers())
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name in live:
                    buffer.copy_(live[name])

    def empty(self) -> None:
        """Let go of the weights."""
        for name, [(module, key), *_] in self._holders.items():
            held = module._parameters[key]
            assert held is not None
            self._put(name, torch.empty_like(held, device="meta"))

    def _put(self, name: str, value: Tensor) -> None:
        param = nn.Parameter(value, requires_grad=False)
        for module, key in self._holders[name]:
            module._parameters[key] = param

    def _make_buffers(self, built: ConstructionRecord) -> None:
        holders = [module for module in self.module.modules() if any(b is not None for b in module._buffers.values())]
        if not holders:
            return
        initializer = find_initializer(self.module) or find_initializer(self.module, built)
        if initializer is None:
            raise ModelError(
                f"the {type(self.module).__name__} has buffers, and nothing can give them values after a build on the "
                "meta device: add init_weights(module) to the model, or use mode sharded"
            )
        for module in holders:
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = torch.empty_like(buffer, device=self._device)
            initializer(module)


# Whether the generator and the trainer give the same tokens the same log-probabilities.


TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Mean difference of log-probabilities that rounding explains, by the format that is computed in."""
WORST = 25.0
"""A single token may differ by so many times the tolerance."""


class Comparison(NamedTuple):
    """How far apart the log-probabilities are, over all tokens of all ranks."""

    mean: float
    worst: float
    tokens: int
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether rounding explains it. A difference that is no number does not agree."""
        return self.mean <= self.tolerance and self.worst <= WORST * self.tolerance

    def __str__(self) -> str:
        return (
            f"log-probabilities of {self.tokens} tokens differ by {self.mean:.2g} in the mean and {self.worst:.2g} at "
            f"most; {self.tolerance:.2g} and {WORST * self.tolerance:.2g} are allowed"
        )


def trainer_logprobs(
    engine: ManualEngine,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    cuts: int = 1,
) -> list[list[float]]:
    """What the trainer's own forward pass says to tokens that are given.

    In evaluation mode, without gradients. Ranks that share a model must all call it, each with its own rows. `cuts` is
    how many of them take a part of each row, where the sequence is split.
    """
    rows = [[*prompt, *completion.tokens] for prompt, completion in zip(prompts, completions, strict=True)]
    ids = pad_to_multiple(pad_rows(rows, engine.world.device), cuts)
    training = engine.model.training
    engine.model.eval()
    try:
        with torch.no_grad():
            logits: Tensor = engine.forward(input_ids=ids)
    finally:
        engine.model.train(training)
    if is_sharded(logits):
        logits = logits.full_tensor()
    logprobs = []
    for row, prompt, completion in zip(logits, prompts, completions, strict=True):
        first, count = len(prompt) - 1, len(completion.tokens)
        row_logprobs = row[first : first + count].float().log_softmax(-1)
        tokens = torch.tensor(completion.tokens, device=row_logprobs.device)[:, None]
        logprobs.append([float(value) for value in row_logprobs.gather(1, tokens).squeeze(1).tolist()])
    return logprobs


def compare_logprobs(
    engine: ManualEngine,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    tolerance: float,
    rows: int = 8,
    cuts: int = 1,
) -> Comparison:
    """Compare answers with the trainer's own forward pass. Every rank must call it, with the same answers.

    Each data-parallel rank looks at its share of them, `rows` at a time.
    """
    if not completions:
        raise GenerateError("there are no answers to compare: generate some first")
    world = engine.world
    groups = world.layout.data_parallel
    share = range(world.data_rank, len(completions), groups)
    differences: list[float] = []
    for turn in range(-(-len(completions) // groups // rows) or 1):
        chosen = list(share[turn * rows : (turn + 1) * rows]) or [0]  # a rank without work helps the others
        asked, given = [prompts[i] for i in chosen], [completions[i] for i in chosen]
        for theirs, ours in zip(trainer_logprobs(engine, asked, given, cuts=cuts), given, strict=True):
            if share[turn * rows :] and world.coordinate("tp") == 0:  # the others along `tp` say the same
                differences += [abs(a - b) for a, b in zip(theirs, ours.logprobs, strict=True)]
    every = [value for values in world.gather(differences) for value in values]
    # `max` would lose what is no number, depending on where it stands.
    spread = torch.tensor(every, dtype=torch.float64)
    return Comparison(float(spread.mean()), float(spread.max()), len(every), tolerance)


def require_agreement(comparison: Comparison) -> None:
    """Raise where the two do not agree."""
    if not comparison.agrees:
        raise RolloutMismatchError(
            f"what writes the answers is not the policy that is trained: {comparison}. Write with the trainer itself "
            "(mode: trainer, or on_mismatch: fallback), or raise the tolerance if rounding is that coarse here"
        )


# Whether whole weights and their cache fit beside what is there already.


MARGIN = 1.25
"""What activations, logits and fragments may take on top."""


def cache_bytes(model: nn.Module, *, rows: int, tokens: int, dtype: torch.dtype) -> int:
    """Keys and values of so many rows. Of models that are not Plait's own it knows nothing, and says 0."""
    features = sum(2 * module.k.out_features for module in model.modules() if isinstance(module, Attention))
    return features * rows * tokens * dtype.itemsize


def free_bytes(world: World) -> int:
    """What this rank could still take; ranks of one machine share its memory out evenly."""
    if world.device.type != "cuda":
        available: int = psutil.virtual_memory().available
        return available // world.ranks.local_size
    free, _ = torch.cuda.mem_get_info(world.device)
    kept = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    return free + kept


def fits(world: World, needed: int) -> bool:
    """Whether so much fits on every rank. Every rank must ask, and all get the same answer."""
    return not world.any(needed * MARGIN > free_bytes(world))


Mode = Literal["auto", "gathered", "sharded", "trainer", "vllm"]
Merge = Callable[[nn.Module, Weights], Weights]
"""From a model and its whole weights to those of a model without adapters."""


class HybridEngine:
    """Trains and writes with the same weights. Every rank makes one, and calls it with the same arguments."""

    def __init__(
        self,
        engine: ManualEngine,
        config: RunConfig,
        *,
        build: Callable[[], nn.Module] | None = None,
        mode: Mode = "auto",
        on_mismatch: Literal["stop", "fallback"] = "stop",
        tolerance: float | None = None,
        max_rows: int = 128,
        decode: Decode | None = None,
        context: int | None = None,
        graphs: bool = True,
        vllm: VllmConfig | None = None,
        merge: Merge | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        """Get ready; nothing is gathered yet.

        `build` makes the module that is in training, without values; absent: the one that `config.model` describes.
        `max_rows` is how many prompts a rank answers at once; `decode` is for stop texts. `vllm` and `merge` are for
        mode vllm, which knows the models of `transformers` and no adapters.
        """
        self.engine = engine
        self.mode: Mode = mode
        """How it writes; see [Note: ways to write]. `auto` takes `gathered` where that fits, else `sharded`."""
        self.on_mismatch = on_mismatch
        policy = make_policy(config.precision)
        self.tolerance = TOLERANCES[policy.compute] if tolerance is None else tolerance
        self._dtype = policy.compute
        self._around = partial(policy.context, engine.world.device)
        self._build = build
        self._config = config
        self._max_rows = max_rows
        self._decode = decode
        self._context = context_of(engine.model) if context is None else context
        self._graphs = graphs
        self._log = log
        self._replica_cache: Replica | None = None
        self._replica_generator: Generator | None = None
        self._vllm_options, self._merge = vllm, merge
        self._vllm: VllmGenerator | None = None
        layout = engine.world.layout
        self._cuts = layout.tp if config.strategy.tensor.sequence_parallel else 1
        if layout.pp > 1 or layout.cp > 1:
            axis = "pp" if layout.pp > 1 else "cp"
            raise GenerateError(f"strategy.layout.{axis} cuts the model or its rows where writing needs them whole")
        if mode == "sharded" and layout.tp > 1:
            raise GenerateError("mode sharded cannot cut single tokens over strategy.layout.tp; use mode gathered")

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keys: Sequence[int] | None = None
    ) -> list[Completion]:
        """An answer to each prompt, on every rank. What writing takes is let go of before this returns.

        Together with the seed, a prompt's key decides what is drawn for it; absent: its number in the list.
        """
        keys = range(len(prompts)) if keys is None else keys
        # On all ranks alike, before any of them waits for another.
        check_prompts(prompts, vocabulary=vocabulary_of(self.engine.model), context=self._context)
        world = self.engine.world
        mode = self._choose_mode(prompts, sampling)
        independent = mode in ("gathered", "vllm")
        group, count = (world.rank, world.size) if independent else (world.data_rank, world.layout.data_parallel)
        mine = range(len(prompts))[group::count]
        most = len(range(len(prompts))[::count])  # of any rank
        width = max(most, 1) if mode == "vllm" else self._max_rows  # it fills its rows up itself
        completions: dict[int, Completion] = {}
        with self._generator_for(mode) as generator:
            for first in range(0, most, width):
                rows = mine[first : first + width]
                if rows or not independent:
                    asked = rows or range(1)  # a rank without work helps those who share the model with it
                    answers = generator.generate([prompts[i] for i in asked], sampling, keys=[keys[i] for i in asked])
                    completions.update(zip(rows, answers, strict=False))
        for others in world.gather(completions):
            completions.update(others)
        return [completions[index] for index in range(len(prompts))]

    def verify(self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> Comparison:
        """Compare answers with the trainer's own forward pass; to be called before the first step, and now and then.

        Where they do not agree, `on_mismatch` says what follows: `stop` raises a `RolloutMismatchError`; `fallback`
        says so and writes with the trainer itself from now on.
        """
        comparison = compare_logprobs(
            self.engine,
            prompts,
            completions,
            tolerance=self.tolerance,
            rows=min(8, self._max_rows),
            cuts=self._cuts,
        )
        if comparison.agrees:
            return comparison
        if self.on_mismatch == "stop" or self.mode == "trainer":
            require_agreement(comparison)
        if self.engine.world.is_main:
            self._log(
                f"WARNING: mode {self.mode} does not write what is trained: {comparison}. From here on the trainer "
                "itself writes, which is right and slow; find the cause before you train long"
            )
        self.mode = "trainer"
        return comparison

    def _choose_mode(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Mode:
        if self.mode != "auto":
            return self.mode
        world, replica = self.engine.world, self._replica()
        rows = min(self._max_rows, -(-len(prompts) // world.size))
        tokens = max((len(prompt) for prompt in prompts), default=0) + sampling.max_new_tokens
        needed = replica.bytes + cache_bytes(replica.module, rows=rows, tokens=tokens, dtype=self._dtype)
        if world.layout.tp > 1 or fits(world, needed):
            return "gathered"
        if world.is_main:
            self._log(f"{needed / 2**30:.1f} GiB of whole weights and cache do not fit: weights are gathered per layer")
        return "sharded"

    def _replica(self) -> Replica:
        if self._replica_cache is None:
            build = self._build
            if build is None:
                if self._config.model is None:
                    raise GenerateError("the run has no section `model`: give HybridEngine a function that builds it")
                build = partial(build_model, self._config.model, trust_code=self._config.trust_code)
            self._replica_cache = Replica(build, self._dtype, self.engine.world.device)
        return self._replica_cache

    def _generator_for(self, mode: Mode) -> AbstractContextManager[Generator | VllmGenerator]:
        if mode == "vllm":
            return self._with_vllm()
        return self._gathered() if mode == "gathered" else self._with_trainer(mode)

    @contextmanager
    def _with_vllm(self) -> Iterator[VllmGenerator]:
        engine = self.engine
        if self._vllm is None:
            if self._config.model is None:
                raise GenerateError(
                    "vLLM builds its model by the section `model`, and the run has none: use another mode"
                )
            self._vllm = VllmGenerator(
                self._config.model,
                engine.world,
                dtype=self._dtype,
                trust_code=self._config.trust_code,
                context=self._context,
                rows=self._max_rows,
                options=self._vllm_options,
                decode=self._decode,
                log=self._log,
            )
        weights: Weights = full_weights(engine, self._dtype)
        self._vllm.load(weights if self._merge is None else self._merge(engine.model, weights))
        try:
            yield self._vllm
        finally:
            self._vllm.sleep()

    @contextmanager
    def _gathered(self) -> Iterator[Generator]:
        """See [Note: memory stays with the allocator]."""
        replica = self._replica()
        replica.fill(self.engine)
        if self._replica_generator is None:  # it remembers which kernels are ready
            self._replica_generator = Generator(
                replica.module,
                decode=self._decode,
                context=self._context,
                graphs=self._graphs,
                around=self._around,
                device=self.engine.world.device,
            )
        try:
            yield self._replica_generator
        finally:
            replica.empty()

    @contextmanager
    def _with_trainer(self, mode: Mode) -> Iterator[Generator]:
        world = self.engine.world
        yield Generator(
            self.engine.model,
            decode=self._decode,
            context=self._context,
            cache=mode == "sharded",
            graphs=False,
            call=self._call,
            any_rank=world.any,
            device=world.device,
        )

    def _call(self, input_ids: Tensor, **kwargs: Any) -> Any:
        """The trainer's forward pass, which may have to cut the rows."""
        return self.engine.forward(input_ids=pad_to_multiple(input_ids, self._cuts), **kwargs)
