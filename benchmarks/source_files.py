"""How much of the source a reader has to follow: the files of Plait that typical runs load, and call into.

    python benchmarks/source_files.py
    python benchmarks/source_files.py --before FOLDER   # another checkout beside it

Each run is started as a user starts it. Every process of it notes the files under `plait/` that are imported, and those
of which at least one function is called (`sys.setprofile`, in the threads of Python too). What counts is the process
that uses the most files: a rank, not the launcher.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

HOOK = """
import atexit, json, os, sys, threading

called = set()

def note(frame, event, arg):
    if event == "call":
        code = frame.f_code
        # Bodies of modules and classes are code objects too; functions alone have optimized locals.
        if code.co_flags & 1 and "/plait/" in code.co_filename:
            called.add(code.co_filename)

def write():
    sys.setprofile(None)
    root = os.environ["COUNTED_SOURCE"]
    loaded = {m.__file__ for m in list(sys.modules.values()) if (getattr(m, "__file__", None) or "").startswith(root)}
    if loaded:
        path = os.path.join(os.environ["COUNTED_FILES"], f"{os.getpid()}.json")
        with open(path, "w") as file:
            json.dump([sorted(loaded), sorted(f for f in called if f.startswith(root))], file)

def leave(status, leave=os._exit):
    write()
    leave(status)

os._exit = leave
atexit.register(write)
threading.setprofile(note)
sys.setprofile(note)
"""

RUN = """
data: {type: text, path: text, vocab_size: 272, seq_len: 32}
batch: {total: 8}
optim: {type: AdamW, lr: 1e-3}
train: {max_steps: 2}
checkpoint: {every: 1}
log: {every: 1}
model:
"""
LLAMA = RUN + "  {type: llama, vocab_size: 272, dim: 32, layers: 2, heads: 2, seq_len: 32}\n"
HF = (
    RUN
    + """
  type: hf
  task: causal-lm
  config:
    {model_type: llama, vocab_size: 272, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
     num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 64}
"""
)


def plait(*words: str) -> list[str]:
    """The command, with the interpreter that runs this file."""
    return [sys.executable, "-m", "plait", *words]


RUNS: dict[str, list[list[str]]] = {
    "ZeRO-3 on two ranks, save and resume": [
        plait("train", "llama.yaml", "--nproc", "2", "strategy=zero3"),
        plait("train", "llama.yaml", "--nproc", "2", "strategy=zero3", "train.max_steps=4", "checkpoint.resume=auto"),
    ],
    "a DeepSpeed script": [
        plait("launch", "--nproc_per_node", "2", "deepspeed_script.py", "--deepspeed", "--steps=4", "--samples=64"),
    ],
    "tp 2 × pp 2 of a `transformers` model": [
        plait("train", "hf.yaml", "--nproc", "4", "strategy={layout: {tp: 2, pp: 2}}"),
    ],
    "PPO with rollouts": [
        plait("ppo", "ppo.yaml", "posttrain.start=null", "train.max_steps=2", "train.val_every=null"),
    ],
}  # fmt: skip


def count(source: Path, commands: list[list[str]]) -> tuple[int, int]:
    """Return how many files the busiest process of these commands loads and calls."""
    with tempfile.TemporaryDirectory(prefix="plait-source-files-") as name:
        folder = Path(name)
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK)
        (folder / "notes").mkdir()
        (folder / "text").mkdir()
        (folder / "llama.yaml").write_text(LLAMA)
        (folder / "hf.yaml").write_text(HF)
        shutil.copy(ROOT / "README.md", folder / "text" / "text.txt")
        shutil.copy(ROOT / "examples" / "deepspeed_script.py", folder)
        shutil.copy(ROOT / "examples" / "rlhf" / "ppo.yaml", folder)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{folder / 'hook'}:{source / 'src'}",
            "COUNTED_FILES": str(folder / "notes"),
            "COUNTED_SOURCE": f"{source / 'src'}/",
            "OMP_NUM_THREADS": "1",
        }
        for command in commands:
            run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            if run.returncode:
                raise SystemExit(f"{' '.join(command)}\nended with {run.returncode}:\n{run.stdout}{run.stderr}")
        notes = [json.loads(path.read_text()) for path in (folder / "notes").iterdir()]
    return max(len(loaded) for loaded, _ in notes), max(len(called) for _, called in notes)


def main() -> None:
    """Count and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout, counted too")
    given = parser.parse_args()
    sources = [*([given.before.resolve()] if given.before else []), ROOT]
    heads = [
        f"{word} {when}" for word in ("loaded", "called") for when in (["before", "now"] if given.before else ["now"])
    ]
    print(f"| run | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for name, commands in RUNS.items():
        counts = [count(source, commands) for source in sources]
        cells = [str(numbers[which]) for which in (0, 1) for numbers in counts]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
