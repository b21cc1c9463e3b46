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
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn

from plait.config import RunConfig, VllmConfig
from plait.distributed import ConstructionRecord, World, dtensor_like, find_initializer, is_sharded, to_local
from plait.engine import ManualEngine, NativeEngine
from plait.errors import GenerateError, ModelError
from plait.generate.batch import Decode
from plait.generate.decoder import filled_up
from plait.generate.generator import Generator, context_of, vocabulary_of
from plait.generate.guard import TOLERANCES, Comparison, compare_logprobs, require_agreement
from plait.generate.options import Completion, Sampling, check_prompts
from plait.generate.vllm import VllmWriter
from plait.generate.weight_names import Weights
from plait.models import Attention, build_model
from plait.precision import make_policy

# A whole copy of a model that is spread over ranks, for as long as it writes.


def whole_weights(engine: NativeEngine, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the live model in the format it computes in, gathered one at a time. Every rank must go along.

    Rounded before it is gathered: that is what the trainer computes with, and half of what would be sent.
    """
    device = engine.world.device
    with torch.no_grad(), engine.master_weights.readable():
        for name, param in engine.model.named_parameters():
            part = to_local(param.detach())
            part = part.to(device, dtype if part.dtype == torch.float32 else part.dtype)
            whole = dtensor_like(part, param.detach())
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
        for prefix, part in self.module.named_modules():
            for key, param in part._parameters.items():
                if param is not None:
                    name = names.setdefault(id(param), f"{prefix}.{key}" if prefix else key)
                    self._holders.setdefault(name, []).append((part, key))
        self._make_buffers(built)
        self.module.eval().requires_grad_(False)

    @property
    def bytes(self) -> int:
        """What it takes when it is full."""
        return sum(param.numel() for param in self.module.parameters()) * self._dtype.itemsize

    def fill(self, engine: NativeEngine) -> None:
        """Take the weights that the engine has now. Every rank must call it."""
        missing, params = set(self._holders), dict(engine.model.named_parameters())
        for name, whole in whole_weights(engine, self._dtype):
            if name not in self._holders:
                raise ModelError(
                    f"the model in training has {name}, and the one built for writing has not: build it the same way, "
                    "adapters included"
                )
            missing.discard(name)
            # A parameter that is whole already, and in the right format, is copied: it is the trainer's to change.
            its_own = whole.data_ptr() != to_local(params[name].detach()).data_ptr()
            self._put(name, whole if its_own else whole.clone())
        if missing:
            raise ModelError(f"the model built for writing has {min(missing)}, and the one in training has not")
        live = dict(engine.model.named_buffers())
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name in live:
                    buffer.copy_(live[name])

    def empty(self) -> None:
        """Let go of the weights."""
        for name, [(part, key), *_] in self._holders.items():
            held = part._parameters[key]
            assert held is not None
            self._put(name, torch.empty_like(held, device="meta"))

    def _put(self, name: str, value: Tensor) -> None:
        param = nn.Parameter(value, requires_grad=False)
        for part, key in self._holders[name]:
            part._parameters[key] = param

    def _make_buffers(self, built: ConstructionRecord) -> None:
        holders = [part for part in self.module.modules() if any(b is not None for b in part._buffers.values())]
        if not holders:
            return
        initializer = find_initializer(self.module) or find_initializer(self.module, built)
        if initializer is None:
            raise ModelError(
                f"the {type(self.module).__name__} has buffers, and nothing can give them values after a build on the "
                "meta device: add init_weights(module) to the model, or use mode sharded"
            )
        for part in holders:
            for key, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[key] = torch.empty_like(buffer, device=self._device)
            initializer(part)


# Whether whole weights and their cache fit beside what is there already.


MARGIN = 1.25
"""What activations, logits and fragments may take on top."""


def cache_bytes(model: nn.Module, *, rows: int, tokens: int, dtype: torch.dtype) -> int:
    """Keys and values of so many rows. Of models that are not Plait's own it knows nothing, and says 0."""
    features = sum(2 * part.k.out_features for part in model.modules() if isinstance(part, Attention))
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
        say: Callable[[str], None] = print,
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
        self._say = say
        self._made: Replica | None = None
        self._alone: Generator | None = None
        self._vllm_options, self._merge = vllm, merge
        self._vllm: VllmWriter | None = None
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
        mode = self._decide(prompts, sampling)
        alone = mode in ("gathered", "vllm")
        part, parts = (world.rank, world.size) if alone else (world.data_rank, world.layout.data_parallel)
        mine = range(len(prompts))[part::parts]
        most = len(range(len(prompts))[::parts])  # of any rank
        width = max(most, 1) if mode == "vllm" else self._max_rows  # it fills its rows up itself
        found: dict[int, Completion] = {}
        with self._writing(mode) as writer:
            for first in range(0, most, width):
                rows = mine[first : first + width]
                if rows or not alone:
                    asked = rows or range(1)  # a rank without work helps those who share the model with it
                    answers = writer.generate([prompts[i] for i in asked], sampling, keys=[keys[i] for i in asked])
                    found.update(zip(rows, answers, strict=False))
        for others in world.gather(found):
            found.update(others)
        return [found[index] for index in range(len(prompts))]

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
            self._say(
                f"WARNING: mode {self.mode} does not write what is trained: {comparison}. From here on the trainer "
                "itself writes, which is right and slow; find the cause before you train long"
            )
        self.mode = "trainer"
        return comparison

    def _decide(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Mode:
        if self.mode != "auto":
            return self.mode
        world, replica = self.engine.world, self._replica()
        rows = min(self._max_rows, -(-len(prompts) // world.size))
        tokens = max((len(prompt) for prompt in prompts), default=0) + sampling.max_new_tokens
        needed = replica.bytes + cache_bytes(replica.module, rows=rows, tokens=tokens, dtype=self._dtype)
        if world.layout.tp > 1 or fits(world, needed):
            return "gathered"
        if world.is_main:
            self._say(f"{needed / 2**30:.1f} GiB of whole weights and cache do not fit: weights are gathered per layer")
        return "sharded"

    def _replica(self) -> Replica:
        if self._made is None:
            build = self._build
            if build is None:
                if self._config.model is None:
                    raise GenerateError("the run has no section `model`: give HybridEngine a function that builds it")
                build = partial(build_model, self._config.model, trust_code=self._config.trust_code)
            self._made = Replica(build, self._dtype, self.engine.world.device)
        return self._made

    def _writing(self, mode: Mode) -> AbstractContextManager[Generator | VllmWriter]:
        if mode == "vllm":
            return self._elsewhere()
        return self._gathered() if mode == "gathered" else self._spread(mode)

    @contextmanager
    def _elsewhere(self) -> Iterator[VllmWriter]:
        engine = self.engine
        if self._vllm is None:
            if self._config.model is None:
                raise GenerateError(
                    "vLLM builds its model by the section `model`, and the run has none: use another mode"
                )
            self._vllm = VllmWriter(
                self._config.model,
                engine.world,
                dtype=self._dtype,
                trust_code=self._config.trust_code,
                context=self._context,
                rows=self._max_rows,
                options=self._vllm_options,
                decode=self._decode,
                say=self._say,
            )
        weights: Weights = whole_weights(engine, self._dtype)
        self._vllm.load(weights if self._merge is None else self._merge(engine.model, weights))
        try:
            yield self._vllm
        finally:
            self._vllm.rest()

    @contextmanager
    def _gathered(self) -> Iterator[Generator]:
        """See [Note: memory stays with the allocator]."""
        replica = self._replica()
        replica.fill(self.engine)
        if self._alone is None:  # it remembers which kernels are ready
            self._alone = Generator(
                replica.module,
                decode=self._decode,
                context=self._context,
                graphs=self._graphs,
                around=self._around,
                device=self.engine.world.device,
            )
        try:
            yield self._alone
        finally:
            replica.empty()

    @contextmanager
    def _spread(self, mode: Mode) -> Iterator[Generator]:
        world = self.engine.world
        yield Generator(
            self.engine.model,
            decode=self._decode,
            context=self._context,
            cache=mode == "sharded",
            graphs=False,
            call=self._call,
            agree=world.any,
            device=world.device,
        )

    def _call(self, input_ids: Tensor, **kwargs: Any) -> Any:
        """The trainer's forward pass, which may have to cut the rows."""
        return self.engine.forward(input_ids=filled_up(input_ids, self._cuts), **kwargs)
