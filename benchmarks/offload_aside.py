"""What `offload.py` does beside its rows: building DeepSpeed's CPU Adam, and watching the host's memory."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import common
from common import Result


class CpuAdam:
    """DeepSpeed's CPU Adam, compiled once, outside of every row's time, and beside what this process plans."""

    def __init__(self) -> None:
        code = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
        self._begin = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def wait(self, limit: float) -> Result:
        """Until it is there."""
        try:
            said = self._process.communicate(timeout=limit)[1]
        except subprocess.TimeoutExpired:
            # Ended now, it would leave a lock behind for which every row would wait. So those wait for it instead.
            return {"error": f"no end after {limit:g} s; it goes on"}
        took = round(time.perf_counter() - self._begin, 1)
        last = (said.strip().splitlines() or [""])[-1]
        return {"seconds": took} if self._process.returncode == 0 else {"seconds": took, "error": last[:200]}


def stay_within(share: float = 0.96) -> None:
    """End this process, saying so, before it takes the machine's memory: what is killed for it may be another one."""
    import psutil

    from plait.launch import cgroup_limit

    whole = min(psutil.virtual_memory().total, cgroup_limit() or float("inf")) / 2**20

    def watch() -> None:
        while common.memory_mib("VmRSS") < share * whole:
            time.sleep(0.1)
        held = common.memory_mib("VmRSS")
        found = {"error": f"stopped when it held {held / 1024:.0f} of the host's {whole / 1024:.0f} GiB"}
        common.reply(lambda: found)

    threading.Thread(target=watch, daemon=True).start()
