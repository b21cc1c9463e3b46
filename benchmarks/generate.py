"""Tokens a second when a Llama writes: Plait beside `transformers.generate`, with the same weights.

    python benchmarks/generate.py                                   # 1B in bf16, 256 new tokens, batches of 8, 32, 128
    python benchmarks/generate.py --sample                          # drawn from all words, as rollouts are
    python benchmarks/generate.py --size tiny --device cpu --batches 1,8 --new 64

Each row in a process of its own; greedy or, with `--sample`, drawn at temperature 1 from all words; no token ends a
text, prompts of unequal length. `plait`: cache and CUDA
graphs. `plait-eager`: no graphs. `hybrid`: from a policy in training, gathering included. `per-layer`: FSDP2 gathers
each block for every token, as a sharded policy without a rollout engine would. `first` is the share of rows whose
first 16 tokens are those of the first row in the table: in bf16 texts part sooner or later. Drawn texts differ anyway.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import common
from common import Result

ROWS = ("transformers", "plait", "plait-eager", "hybrid", "per-layer")
SEED = 3
WARM = 8
"""Tokens with which rows warm up that have nothing to record."""
Write = Callable[[list[list[int]], int], list[list[int]]]
"""From prompts and how many tokens are wanted to these tokens."""


def make_prompts(rows: int, most: int, vocabulary: int) -> list[list[int]]:
    """Unequal prompts, the same in every process."""
    chance = random.Random(SEED)
    return [[chance.randrange(vocabulary) for _ in range(chance.randint(most // 2, most))] for _ in range(rows)]


class Job:
    """The model and the clock of one row. Made in the child, which has torch."""

    def __init__(self, given: argparse.Namespace) -> None:
        import torch

        from plait.models import build_model, preset

        self.torch, self.device, self.given = torch, torch.device(given.device), given
        self.dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
        changes = {"tie_embeddings": True} if given.size == "tiny" else {}
        self.config: Any = preset("llama", given.size, **changes, seq_len=4096)
        self.build = lambda: build_model(self.config)
        torch.manual_seed(SEED)
        with self.device:
            self.model = build_model(self.config).to(self.dtype).requires_grad_(False)

    def measure(self, write: Write, *, warm: int | None = None) -> Result:
        """Tokens a second of each batch size; the first turn warms up, with all tokens or so many."""
        found: Result = {"device": self._named(), "batches": {}}
        for rows in self.given.batches:
            prompts = make_prompts(rows, self.given.prompt, self.config.vocab_size)
            seconds, texts = float("inf"), []
            for turn in range(self.given.turns + 1):
                self._wait()
                print(f"turn {turn} of {rows} rows begins", flush=True)  # the last words of a row that takes too long
                begun = time.perf_counter()
                texts = write(prompts, self.given.new if turn or warm is None else min(warm, self.given.new))
                self._wait()
                if turn:
                    seconds = min(seconds, time.perf_counter() - begun)
            assert all(len(text) == self.given.new for text in texts), "a text ended early"
            found["batches"][str(rows)] = {
                "tokens_per_s": rows * self.given.new / seconds,
                "ms_per_token": 1000 * seconds / self.given.new,
            }
            if not self.given.sample:
                found["batches"][str(rows)]["first"] = [text[:16] for text in texts]
        return found

    def writing(self, generator: Any) -> Write:
        """With Plait's generator, or what has its method."""
        from plait.generate import Sampling

        temperature = 1.0 if self.given.sample else 0.0

        def write(prompts: list[list[int]], new: int) -> list[list[int]]:
            answers = generator.generate(prompts, Sampling(new, temperature=temperature, seed=SEED))
            return [each.tokens for each in answers]

        return write

    def _wait(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def _named(self) -> str:
        return self.torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"


def transformers_row(job: Job) -> Result:
    """`generate` of transformers, left-padded as its users do it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from plait.models.registry import to_transformers

    torch, portable = job.torch, to_transformers(job.config)
    description = dict(portable.description)
    config = AutoConfig.for_model(description.pop("model_type"), **description)
    with job.device:
        theirs = AutoModelForCausalLM.from_config(config, dtype=job.dtype).eval()
    ours = job.model.state_dict()
    assert portable.made is not None
    state = {name: made.make(*(ours[part] for part in made.sources)) for name, made in portable.made.items()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)  # noqa: PT018

    def write(prompts: list[list[int]], new: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=job.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=job.device)
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": job.given.sample}
        if job.given.sample:
            options |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        with torch.no_grad():
            out = theirs.generate(ids, attention_mask=mask, pad_token_id=0, **options)
        answers: list[list[int]] = out[:, width:].tolist()
        return answers

    return job.measure(write, warm=WARM)


def plait_row(job: Job, *, graphs: bool = True) -> Result:
    """Plait's own generation."""
    from plait.generate import Generator

    return job.measure(job.writing(Generator(job.model, graphs=graphs)))


def hybrid_row(job: Job) -> Result:
    """From an engine in training, with the gathering of every rollout in the time."""
    from plait.config import parse_sections
    from plait.distributed import open_world
    from plait.engine import Preparation, prepare_manual
    from plait.generate import HybridEngine

    model = job.config.model_dump()
    precision = {"compute": "bf16", "autocast": False} if job.device.type == "cuda" else "fp32"
    config = parse_sections(model=model, precision=precision, device=job.given.device, optim={"type": "SGD"}).config
    engine = prepare_manual(Preparation(config, open_world(config), model=None, log=lambda _line: None))
    weights = job.model.state_dict()
    for name, tensor in engine.weights().items():
        tensor.copy_(weights[name])
    engine.weights_changed()
    del weights, job.model
    hybrid = HybridEngine(engine, config, mode="gathered", max_rows=max(job.given.batches))
    return job.measure(job.writing(hybrid))


def per_layer_row(job: Job) -> Result:
    """A sharded model that gathers each block for every token; on one device, a copy stands for the network."""
    common.join_alone()
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from plait.generate import Generator

    dist.init_process_group("nccl" if job.device.type == "cuda" else "gloo")
    for block in job.model.blocks:
        fully_shard(block)
    fully_shard(job.model)
    generator = Generator(job.model, graphs=False, device=job.device)
    return job.measure(job.writing(generator), warm=WARM)


def run(name: str, given: argparse.Namespace) -> Result:
    """One row, in the child."""
    job = Job(given)
    match name:
        case "transformers":
            return transformers_row(job)
        case "hybrid":
            return hybrid_row(job)
        case "per-layer":
            return per_layer_row(job)
    return plait_row(job, graphs=name == "plait")


def as_table(found: dict[str, Result], batches: list[int]) -> str:
    """Tokens a second, and how often that of the first row; how many texts begin as its do, where that is known."""
    lines, base = [], next((one["batches"] for one in found.values() if "batches" in one), {})
    compared = any("first" in one for one in base.values())
    for name, one in found.items():
        if "error" in one:
            lines.append([name, one["error"], "", "", ""])
            continue
        for rows in map(str, batches):
            here, there = one["batches"][rows], base[rows]
            ratio = here["tokens_per_s"] / there["tokens_per_s"]
            speed = f"{here['tokens_per_s']:,.0f}"
            lines.append([name, rows, speed, f"{here['ms_per_token']:.2f}", f"{ratio:.1f}×"])
            if compared:
                same = sum(a == b for a, b in zip(here["first"], there["first"], strict=True)) / int(rows)
                lines[-1].append(f"{same:.0%}")
    head = ["row", "batch", "tokens/s", "ms/token", "beside the first", *(["first"] if compared else [])]
    return common.table(head, [line + [""] * (len(head) - len(line)) for line in lines])


def main() -> None:
    options = common.parser(__doc__, ROWS)
    options.add_argument("--size", choices=("tiny", "160m", "1b", "3b", "8b"), default="1b")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--batches", default="8,32,128", help="rows of a batch, comma-separated")
    options.add_argument("--prompt", type=int, default=128, help="tokens of the longest prompt")
    options.add_argument("--new", type=int, default=256, help="new tokens of each row")
    options.add_argument("--sample", action="store_true", help="draw at temperature 1 from all words")
    options.add_argument("--turns", type=int, default=2, help="measured turns; the best counts")
    options.add_argument("--limit", type=float, default=400.0, help="seconds that one row may take")
    given = options.parse_args()
    text, given.batches = given.batches, [int(each) for each in given.batches.split(",")]
    if given.child is not None:
        common.reply(lambda: run(given.child, given))
    where, found = common.machine(), {}
    shape = {k: getattr(given, k) for k in ("size", "device", "prompt", "new", "turns")} | {"batches": text}
    words = [str(word) for key, value in shape.items() for word in (f"--{key}", value)]
    words += ["--sample"] if given.sample else []
    for name in common.chosen(given.rows, ROWS):
        said = common.run_child(common.itself(__file__, "--child", name, *words), limit=given.limit)
        found[name] = said if "error" in said else said["ranks"][0]
        figures = {rows: round(one["tokens_per_s"]) for rows, one in found[name].get("batches", {}).items()}
        common.show(row=name, error=found[name].get("error"), tokens_per_s=figures)
    device = next((one["device"] for one in found.values() if "device" in one), given.device)
    title = (
        f"{device}; {common.say_machine(where)}, transformers {common.version('transformers')}; Llama {given.size}, "
        f"prompts of {given.prompt // 2} to {given.prompt} tokens, {given.new} new ones, "
        + ("drawn at temperature 1 from all words" if given.sample else "greedy")
    )
    found_and_where = {"machine": where, "results": found}
    common.finish(given.json, found_and_where, f"{title}.\n\n{as_table(found, given.batches)}")


if __name__ == "__main__":
    main()
