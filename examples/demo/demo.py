"""The main job, end to end, with nothing but this repository: about two minutes on two cores.

Trains a small Llama on the Python standard library's own sources under ZeRO-3, resumes it under DDP, continues a
text, and leaves a report. Each command below is printed as a user would type it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RUN = Path("runs/demo")
PROMPTS = ("def __init__(self", "import os\n", "class ")


def plait(*arguments: str, capture: bool = False) -> str:
    print(f"\n$ plait {shlex.join(arguments)}\n", flush=True)
    command = [sys.executable, "-m", "plait", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE if capture else None, text=True) as process:
        try:
            text, _ = process.communicate()
        except KeyboardInterrupt:  # the command has got it too: it saves, and leaves
            process.wait()
            sys.exit(130)
    if process.returncode:
        sys.exit(process.returncode)
    return text or ""


def processes() -> int:
    """Two, or as many as there are GPUs to give each its own."""
    from plait.launch import gpu_count

    return min(2, gpu_count() or 2)


def main() -> None:
    os.chdir(ROOT)
    if RUN.exists():
        print(f"Removing the {RUN} of an earlier demo.")
        shutil.rmtree(RUN)
    config = str((HERE / "run.yaml").relative_to(ROOT))
    ranks = ("--nproc", str(processes()))

    print("1. Train under ZeRO-3: parameters, gradients and optimizer sharded over the processes.")
    plait("train", config, *ranks, "strategy.zero=3", "train.stop_after=80")

    print("\n2. Go on from that checkpoint under DDP: every process holds the whole. The loss curve continues.")
    plait("train", config, *ranks, "strategy.zero=0", "checkpoint.resume=auto")

    print("\n3. Let the model continue a text.")
    samples = []
    for index, prompt in enumerate(PROMPTS):
        text = plait("generate", str(RUN), "--prompt", prompt, "--tokens", "80", "--seed", str(index), capture=True)
        print(text)
        path = RUN / f"sample {index + 1}.txt"
        path.write_text(text)
        samples += ["--sample", str(path)]

    print("\n4. Draw the run.")
    plait("report", str(RUN), *samples)
    print(f"\nDone. Open {RUN / 'report.html'} in a browser; the checkpoints are in {RUN / 'checkpoints'}.")


if __name__ == "__main__":
    main()
