"""Bandwidth of tensors in files, beside fio on the same file.

    python benchmarks/files.py --folder /data --size-gib 4

One file of the given size is written and read, by fio (libaio, direct, the same request size and number in flight) and
by `plait.kernels.direct_io`, in turn, round after round in one run, so that what else the disk does hits both alike.
Without fio, `dd` with direct I/O takes its place, one request at a time. Plait's process is asked for its peak memory
as well.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import common
from common import Result, median

from plait.kernels.direct_io import IN_FLIGHT, REQUEST_BYTES


def run_plait(path: Path, size: int) -> Result:
    """GB/s of one pass each way, in this process."""
    import torch

    from plait.kernels.direct_io import FileQueue, TensorFile
    from plait.kernels.pinned import host_empty

    torch.set_num_threads(1)
    piece = min(size, 256 << 20)
    rooms = [host_empty(piece, dtype=torch.uint8) for _ in range(2)]
    for room in rooms:
        room.random_()
    found: Result = {}
    with FileQueue() as queue:
        file = TensorFile.at(queue, path, size)
        for room in rooms:  # training uses its buffers over and over, as fio does; the first read into one is slower
            file.read_into(room, 0).wait()
        for way, move in (("write", file.write_from), ("read", file.read_into)):
            start = time.perf_counter()
            pending: list = [None, None]
            for turn, at in enumerate(range(0, size, piece)):
                room = turn % 2
                if pending[room] is not None:
                    pending[room].wait()
                pending[room] = move(rooms[room][: min(piece, size - at)], at)
            for transfer in pending:
                if transfer is not None:
                    transfer.wait()
            found[way] = size / (time.perf_counter() - start) / 1e9
        found["direct"] = file.direct
        found["why"] = file.buffered_because
        file.close()
    found["peak_mib"] = common.memory_mib("VmHWM")
    return found


def run_fio(path: Path, size: int) -> Result:
    """The same by fio."""
    found: Result = {}
    for way in ("write", "read"):
        told = subprocess.run(
            [
                *("fio", "--name=peer", f"--filename={path}", f"--size={size}", f"--rw={way}", f"--bs={REQUEST_BYTES}"),
                *(f"--iodepth={IN_FLIGHT}", "--ioengine=libaio", "--direct=1", "--fallocate=none"),
                "--output-format=json",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        found[way] = json.loads(told[told.index("{") :])["jobs"][0][way]["bw_bytes"] / 1e9
    return found


def run_dd(path: Path, size: int) -> Result:
    """The same by dd, with one request at a time."""
    count = size // REQUEST_BYTES
    found: Result = {}
    for way, ends in (
        ("write", ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc"]),
        ("read", [f"if={path}", "of=/dev/null", "iflag=direct"]),
    ):
        told = subprocess.run(
            ["dd", *ends, f"bs={REQUEST_BYTES}", f"count={count}"], capture_output=True, text=True, check=True
        ).stderr
        seconds = re.search(r"copied, ([\d.]+) s", told)
        assert seconds is not None, told
        found[way] = count * REQUEST_BYTES / float(seconds[1]) / 1e9
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--size-gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    size = int(given.size_gib * 2**30) // REQUEST_BYTES * REQUEST_BYTES
    if given.child:
        common.reply(lambda: run_plait(Path(given.child), size))
    machine = common.machine()
    peer = "fio" if shutil.which("fio") else "dd"
    print(common.say_machine(machine))
    print(f"one file of {given.size_gib:g} GiB, requests of {REQUEST_BYTES >> 20} MiB, {IN_FLIGHT} in flight\n")
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="plait-files-") as folder:
        path = Path(folder) / "file"
        run_dd(path, size)  # the file exists and its blocks are written, for both
        rows: dict[str, list[Result]] = {peer: [], "plait": []}
        for _ in range(given.rounds):
            rows[peer].append(run_fio(path, size) if peer == "fio" else run_dd(path, size))
            answer = common.run_child(
                common.itself(__file__, "--child", str(path), "--size-gib", str(given.size_gib)), limit=600
            )
            if "error" in answer:
                raise SystemExit(answer["error"])
            rows["plait"].append(answer["ranks"][0])
    found = rows["plait"][0]
    print("| GB/s, median (best) | write | read |\n|---|---|---|")
    best = {}
    for name, results in rows.items():
        cells = {way: [result[way] for result in results] for way in ("write", "read")}
        best[name] = {way: median(values) for way, values in cells.items()}
        print(f"| {name} | " + " | ".join(f"{median(v):.2f} ({max(v):.2f})" for v in cells.values()) + " |")
    shares = [f"{best['plait'][way] / best[peer][way]:.0%}" for way in ("write", "read")]
    print(f"| plait to {peer} | {shares[0]} | {shares[1]} |\n")
    how = "past the page cache" if found["direct"] else f"through the page cache: {found['why']}"
    print(f"Plait moved it {how}; its process held {max(r['peak_mib'] for r in rows['plait']):.0f} MiB at most.")


if __name__ == "__main__":
    main()
