"""Generation with the model that is being trained (the policy), and a check against the trainer's forward pass.

[Note: generation modes] With `gathered`, every rank gathers the full weights once per call of `generate`, in the
compute dtype, and generates with them independently; the prompts are divided among all ranks, also among those of a
tensor-parallel group. With `sharded`, the model stays sharded and gathers its weights layer by layer for every token,
as in training; this is for models that do not fit on one rank. With `trainer`, each token is computed by the trainer's
own forward pass without a KV cache; this is slow, and the reference. Except for rounding, answers depend neither on
which of these modes is used nor on the number of ranks. `vllm` is like `gathered`, but the full weights are loaded into
a vLLM engine on every rank, which has other random numbers; see [Note: how vLLM is used].

[Note: memory stays with the allocator] After generation, full weights and KV cache are freed, and torch's allocator
keeps their memory for the trainer's next step. If it were returned to the device (`empty_cache`), it would have to be
allocated again, and with it all other memory that is cached but not in use at that moment. Where memory is short, the
allocator returns cached memory by itself; so does `kernels.capture_graph`, because a graph has a separate memory pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import psutil
import torch
from torch import Tensor, nn

from plait.config import RunConfig, VllmConfig
from plait.distributed import (
    ConstructionRecord,
    World,
    dtensor_like,
    find_initializer,
    is_sharded,
    persistent_buffers,
    to_local,
)
from plait.engine import ManualEngine, NativeEngine
from plait.errors import GenerateError, ModelError, RolloutMismatchError
from plait.generate.batch import Decode
from plait.generate.decoder import pad_rows, pad_to_multiple
from plait.generate.generator import Generator, context_of, vocabulary_of
from plait.generate.options import Completion, Sampling, check_prompts
from plait.generate.vllm import VllmGenerator, Weights
from plait.models import Attention, build_model
from plait.precision import make_policy


def full_weights(engine: NativeEngine, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of the model with its name, in the compute dtype, gathered one at a time. A collective.

    Parameters are cast before they are gathered: the trainer computes with the same cast values, and half as many bytes
    are sent.
    """
    device = engine.world.device
    with torch.no_grad(), engine.master_weights.readable():
        for name, param in engine.model.named_parameters():
            shard = to_local(param.detach())
            shard = shard.to(device, dtype if shard.dtype == torch.float32 else shard.dtype)
            full = dtensor_like(shard, param.detach())
            yield name, full.full_tensor() if is_sharded(full) else full


class Replica:
    """A copy of the model without parallelism; its parameters are on the meta device until `fill` is called.

    Buffers that are not in the state dict get their values from the model's initializer, or from its constructor.
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
        """The size of its weights in the compute dtype."""
        return sum(param.numel() for param in self.module.parameters()) * self._dtype.itemsize

    def fill(self, engine: NativeEngine) -> None:
        """Load the engine's current weights and buffers. A collective. Raise a `ModelError` if their names differ."""
        missing, params = set(self._holders), dict(engine.model.named_parameters())
        for name, full in full_weights(engine, self._dtype):
            if name not in self._holders:
                raise ModelError(
                    f"the model in training has {name}, and the copy for generation has not: build both the same way, "
                    "adapters included"
                )
            missing.discard(name)
            # A parameter that is neither sharded nor cast is the trainer's own tensor, and has to be cloned.
            is_copy = full.data_ptr() != to_local(params[name].detach()).data_ptr()
            self._put(name, full if is_copy else full.clone())
        if missing:
            raise ModelError(f"the copy for generation has {min(missing)}, and the model in training has not")
        live = dict(engine.model.named_buffers())
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name in live:
                    buffer.copy_(live[name])

    def empty(self) -> None:
        """Free the weights: the parameters are on the meta device again."""
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
                f"the {type(self.module).__name__} has buffers, which nothing can initialize after it was built on the "
                "meta device: add init_weights(module) to the model, or use mode sharded"
            )
        for module in holders:
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = torch.empty_like(buffer, device=self._device)
            initializer(module)


# Comparing the log-probabilities that generator and trainer compute for the same tokens.


TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""The largest mean difference of log-probabilities that rounding can explain, by compute dtype."""
WORST = 25.0
"""The largest single difference that is allowed, as a multiple of the tolerance."""


class Comparison(NamedTuple):
    """The differences of log-probabilities, over all tokens of all ranks."""

    mean: float
    worst: float
    tokens: int
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether the differences are within the tolerance, so that rounding can explain them; False for NaN."""
        return self.mean <= self.tolerance and self.worst <= WORST * self.tolerance

    def __str__(self) -> str:
        return (
            f"log-probabilities of {self.tokens} tokens differ by {self.mean:.2g} on average and {self.worst:.2g} at "
            f"most; {self.tolerance:.2g} and {WORST * self.tolerance:.2g} are allowed"
        )


def trainer_logprobs(
    engine: ManualEngine,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    cuts: int = 1,
) -> list[list[float]]:
    """Return the log-probabilities of the tokens of each answer, computed by the trainer's own forward pass.

    It runs in evaluation mode, without gradients. Ranks that share a model must all call this, each with its own rows.
    `cuts` is the number of ranks that a sequence is split over.
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
    """Return how the answers' log-probabilities differ from those of the trainer's own forward pass. A collective.

    Every rank passes the same answers; each data-parallel rank computes an equal part of them, `rows` at a time.
    """
    if not completions:
        raise GenerateError("no answers to compare: generate some first")
    world = engine.world
    groups = world.layout.data_parallel
    share = range(world.data_rank, len(completions), groups)
    differences: list[float] = []
    for batch in range(-(-len(completions) // groups // rows) or 1):
        chosen = list(share[batch * rows : (batch + 1) * rows]) or [
            0
        ]  # a rank without rows takes part in the collectives
        batch_prompts, batch_completions = [prompts[i] for i in chosen], [completions[i] for i in chosen]
        for theirs, ours in zip(
            trainer_logprobs(engine, batch_prompts, batch_completions, cuts=cuts), batch_completions, strict=True
        ):
            if share[batch * rows :] and world.coordinate("tp") == 0:  # other ranks along `tp` have the same rows
                differences += [abs(a - b) for a, b in zip(theirs, ours.logprobs, strict=True)]
    every = [value for values in world.gather(differences) for value in values]
    # Python's `max` would ignore NaN, depending on its position.
    spread = torch.tensor(every, dtype=torch.float64)
    return Comparison(float(spread.mean()), float(spread.max()), len(every), tolerance)


def require_agreement(comparison: Comparison) -> None:
    """Raise a `RolloutMismatchError` if the differences are larger than rounding can explain."""
    if not comparison.agrees:
        raise RolloutMismatchError(
            f"the rollouts are not from the policy that is trained: {comparison}. Generate with the trainer itself "
            "(mode: trainer, or on_mismatch: fallback), or raise the tolerance if rounding explains the difference"
        )


MARGIN = 1.25
"""The factor on the size of weights and cache that allows for activations, logits and fragmentation."""


def cache_bytes(model: nn.Module, *, rows: int, tokens: int, dtype: torch.dtype) -> int:
    """Return the size of a KV cache for `rows` rows of `tokens` tokens; 0 for models that are not Plait's own."""
    features = sum(2 * module.k.out_features for module in model.modules() if isinstance(module, Attention))
    return features * rows * tokens * dtype.itemsize


def free_bytes(world: World) -> int:
    """Return the bytes that this rank can still allocate; on a CPU, an equal part of the machine's free memory."""
    if world.device.type != "cuda":
        available: int = psutil.virtual_memory().available
        return available // world.ranks.local_size
    free, _ = torch.cuda.mem_get_info(world.device)
    kept = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    return free + kept


def fits(world: World, needed: int) -> bool:
    """Whether `needed` bytes, times `MARGIN`, are free on every rank. A collective, with the same result on all."""
    return not world.any(needed * MARGIN > free_bytes(world))


Mode = Literal["auto", "gathered", "sharded", "trainer", "vllm"]
Merge = Callable[[nn.Module, Weights], Weights]
"""A function of a model and its full weights; it returns the weights of the model with adapters merged."""


class HybridEngine:
    """Generates with the weights of an engine in training. Every rank makes the same calls."""

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
        """Check the arguments; no weights are gathered yet.

        `build` builds the module that is in training; by default that of `config.model`. `max_rows` is the number of
        prompts that a rank generates at once; `decode` is for stop texts. `vllm` and `merge` are for mode vllm, which
        supports the models of `transformers` without adapters.
        """
        self.engine = engine
        self.mode: Mode = mode
        """See [Note: generation modes]. `auto` uses `gathered` if that fits on every rank, else `sharded`."""
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
            size = layout.pp if layout.pp > 1 else layout.cp
            raise GenerateError(f"strategy.layout.{axis}={size} does not support generation; set it to 1")
        if mode == "sharded" and layout.tp > 1:
            raise GenerateError(f"mode sharded does not support strategy.layout.tp={layout.tp}; use mode gathered")

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keys: Sequence[int] | None = None
    ) -> list[Completion]:
        """Generate and return an answer to each prompt, on every rank. A collective.

        The memory for it is freed before this returns. The seed and a prompt's key determine its random numbers; by
        default the key is the prompt's index.
        """
        keys = range(len(prompts)) if keys is None else keys
        # All ranks raise the same error here, before the first collective.
        check_prompts(prompts, vocabulary=vocabulary_of(self.engine.model), context=self._context)
        world = self.engine.world
        mode = self._choose_mode(prompts, sampling)
        independent = mode in ("gathered", "vllm")
        group, count = (world.rank, world.size) if independent else (world.data_rank, world.layout.data_parallel)
        local = range(len(prompts))[group::count]
        most = len(range(len(prompts))[::count])  # the largest number of prompts of a rank
        width = max(most, 1) if mode == "vllm" else self._max_rows  # vLLM batches by itself
        completions: dict[int, Completion] = {}
        with self._generator_for(mode) as generator:
            for first in range(0, most, width):
                rows = local[first : first + width]
                if rows or not independent:
                    indices = rows or range(1)  # a rank without prompts takes part in the collectives
                    answers = generator.generate(
                        [prompts[i] for i in indices], sampling, keys=[keys[i] for i in indices]
                    )
                    completions.update(zip(rows, answers, strict=False))
        for completions_of_rank in world.gather(completions):
            completions.update(completions_of_rank)
        return [completions[index] for index in range(len(prompts))]

    def verify(self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> Comparison:
        """Compare the answers' log-probabilities with the trainer's own, and return the differences. A collective.

        Call this before the first step and regularly. If they do not agree, `on_mismatch: stop` raises a
        `RolloutMismatchError`; `fallback` logs a warning, and mode `trainer` is used from then on.
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
                f"WARNING: mode {self.mode} does not generate with the policy that is trained: {comparison}. From now "
                "on the trainer itself generates, which is correct and slow; find the cause before a long training"
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
            self._log(f"{needed / 2**30:.1f} GiB of full weights and cache do not fit: weights are gathered per layer")
        return "sharded"

    def _replica(self) -> Replica:
        if self._replica_cache is None:
            build = self._build
            if build is None:
                if self._config.model is None:
                    raise GenerateError("the run has no section `model`: pass `build` to HybridEngine")
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
                raise GenerateError("mode vllm needs the section `model`, and the run has none: use another mode")
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
        weights = weights if self._merge is None else self._merge(engine.model, weights)
        buffers = ((name, b) for name, b in persistent_buffers(engine.model) if self._vllm.needs(name))
        self._vllm.load(chain(weights, buffers))
        try:
            yield self._vllm
        finally:
            self._vllm.sleep()

    @contextmanager
    def _gathered(self) -> Iterator[Generator]:
        """Return a context with a generator for the gathered weights; see [Note: memory stays with the allocator]."""
        replica = self._replica()
        replica.fill(self.engine)
        if self._replica_generator is None:  # kept, because its decoder knows which kernels are compiled
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
        """Return the result of the trainer's forward pass; rows are padded so that ranks can split them evenly."""
        return self.engine.forward(input_ids=pad_to_multiple(input_ids, self._cuts), **kwargs)
