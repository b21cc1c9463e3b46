"""Tensors in files: direct I/O, several requests in flight, nothing left behind.

[Note: direct I/O from threads] A request goes past the page cache, so that it takes no host memory and no copy, where
the file system allows it (`O_DIRECT`). It must then be made of whole, aligned blocks. `preadv` and `pwritev` let go of
the interpreter, so a few threads keep a disk as busy as an asynchronous interface would, with nothing to compile and
no kernel version to ask for. A tensor that is not aligned passes through an aligned buffer, one for each thread; so
memory is bounded by the number of threads, whatever is asked for.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from plait.errors import TrainingError
from plait.kernels.pinned import ALIGNMENT, host_empty, rounded

IN_FLIGHT = 8
"""Requests at the disk at one time."""
REQUEST_BYTES = 1 << 20
"""A transfer is cut into requests of this size, so that a single large one keeps the disk busy too."""

_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux has these two; elsewhere the page cache and a name do
_NAMELESS = getattr(os, "O_TMPFILE", 0)


class FileTransfer:
    """Tensor data on its way. The tensor must not be touched until `wait` returns."""

    def __init__(self, workers: list[Future[None]]) -> None:
        self._workers = workers

    def wait(self) -> None:
        """Until all is done. Raises what went wrong, after the last request has ended."""
        wait(self._workers)
        for worker in self._workers:
            worker.result()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(worker.done() for worker in self._workers)


class FileQueue:
    """The threads that move tensors between host memory and files. One serves any number of files."""

    def __init__(self, *, in_flight: int = IN_FLIGHT, request_bytes: int = REQUEST_BYTES) -> None:
        assert request_bytes % ALIGNMENT == 0, "requests are made of whole blocks"
        self.request_bytes = request_bytes
        self._in_flight = in_flight
        self._threads = ThreadPoolExecutor(in_flight, thread_name_prefix="plait-files")
        self._own = threading.local()

    def submit(self, work: Callable[[], None], *, times: int) -> list[Future[None]]:
        """Let up to so many threads do the same work, as soon as they are free, in the order of asking."""
        return [self._threads.submit(work) for _ in range(min(times, self._in_flight))]

    def bounce(self, size: int) -> Tensor:
        """This thread's aligned buffer."""
        room: Tensor | None = getattr(self._own, "room", None)
        if room is None:
            room = self._own.room = host_empty(self.request_bytes, dtype=torch.uint8)
        return room[:size]

    def close(self) -> None:
        """Finish what was asked for and end the threads."""
        self._threads.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()


class TensorFile:
    """A file of fixed size that holds tensors at places of the caller's choice.

    Places are multiples of `ALIGNMENT`, and a tensor owns its last block to the end: `rounded(bytes)` is what it takes
    up. The space is reserved when the file is made, so a disk is found too small then and not in the middle of a run.
    """

    def __init__(self, queue: FileQueue, descriptor: int, size: int, where: str, buffered_because: str) -> None:
        """Use `scratch` or `at` to make one."""
        self.size = size
        self.where = where
        self.buffered_because = buffered_because
        """Why the page cache is in between; empty for direct I/O."""
        self._queue = queue
        self._file = descriptor

    @classmethod
    def scratch(cls, queue: FileQueue, folder: Path, size: int) -> Self:
        """A new file without a name: however the process ends, the space is free again."""
        folder.mkdir(parents=True, exist_ok=True)
        return cls._reserve(queue, _open_nameless(folder), folder, f"{folder}/(scratch)", size)

    @classmethod
    def at(cls, queue: FileQueue, path: Path, size: int) -> Self:
        """The file of this name, made or kept and brought to at least `size` bytes."""
        path.parent.mkdir(parents=True, exist_ok=True)
        return cls._reserve(queue, os.open(path, os.O_RDWR | os.O_CREAT, 0o600), path.parent, str(path), size)

    @classmethod
    def _reserve(cls, queue: FileQueue, descriptor: int, folder: Path, where: str, size: int) -> Self:
        size = rounded(size)
        try:
            missing = size - os.fstat(descriptor).st_blocks * 512
            free = shutil.disk_usage(folder).free
            if missing > free:
                raise _full(where, size, free)
            if missing > 0 and not _allocate(descriptor, size):
                raise _full(where, size, shutil.disk_usage(folder).free)
            return cls(queue, descriptor, size, where, _make_direct(descriptor))
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def direct(self) -> bool:
        """Whether requests go past the page cache."""
        return not self.buffered_because

    @property
    def descriptor(self) -> int:
        """For those who map the file into memory."""
        return self._file

    def read_into(self, tensor: Tensor, at: int) -> FileTransfer:
        """Fill a contiguous CPU tensor with the bytes from `at` on."""
        return self._move(tensor, at, self._read)

    def write_from(self, tensor: Tensor, at: int) -> FileTransfer:
        """Write a contiguous CPU tensor to the bytes from `at` on."""
        return self._move(tensor, at, self._write)

    def close(self) -> None:
        """Let go of the file. Transfers must have ended."""
        os.close(self._file)

    def _move(self, tensor: Tensor, at: int, request: Callable[[Tensor, int], None]) -> FileTransfer:
        assert tensor.device.type == "cpu", "files meet host memory only"
        assert tensor.is_contiguous(), "a file takes bytes in a row"
        # By its strides: a tensor with one element in a row counts as contiguous whatever stride that row has.
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        assert at % ALIGNMENT == 0, f"byte {at} is not the beginning of a block"
        assert at + flat.numel() <= self.size, f"{self.where} ends at byte {self.size}"
        step = self._queue.request_bytes
        places = iter(range(0, flat.numel(), step))

        def work() -> None:
            for begin in places:  # each thread takes the next one
                request(flat[begin : begin + step], at + begin)

        return FileTransfer(self._queue.submit(work, times=-(-flat.numel() // step)))

    def _fits(self, part: Tensor) -> bool:
        return not self.direct or (part.data_ptr() % ALIGNMENT == 0 and part.numel() % ALIGNMENT == 0)

    def _read(self, part: Tensor, at: int) -> None:
        if self._fits(part):
            self._fill(part, at)
        else:
            buffer = self._queue.bounce(rounded(part.numel()))
            self._fill(buffer, at)
            part.copy_(buffer[: part.numel()])

    def _write(self, part: Tensor, at: int) -> None:
        if not self._fits(part):
            buffer = self._queue.bounce(rounded(part.numel()))
            buffer[: part.numel()].copy_(part)
            part = buffer
        self._drain(part, at)

    def _fill(self, part: Tensor, at: int) -> None:
        data, begin = _memory(part), at
        while len(data):
            try:
                count = os.preadv(self._file, [data], at)
            except OSError as error:
                raise self._failed("read", len(data), at, error) from error
            if count == 0:
                raise TrainingError(
                    f"{self.where} ends after byte {at}, in the middle of a read of {part.numel()} bytes from {begin}: "
                    "it was shortened by someone else while it was in use"
                )
            data, at = data[count:], at + count

    def _drain(self, part: Tensor, at: int) -> None:
        data = _memory(part)
        while len(data):
            try:
                count = os.pwritev(self._file, [data], at)
            except OSError as error:
                raise self._failed("write", len(data), at, error) from error
            data, at = data[count:], at + count

    def _failed(self, verb: str, size: int, at: int, error: OSError) -> TrainingError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return TrainingError(
                f"{self.where}: the disk or quota is full, at byte {at}. Free space or use another disk."
            )
        return TrainingError(
            f"{self.where}: cannot {verb} {size} bytes at {at}: {error.strerror} (errno {error.errno})"
        )


def _memory(part: Tensor) -> memoryview:
    return memoryview(part.numpy())  # type: ignore[arg-type]


def _full(where: str, size: int, free: int) -> TrainingError:
    return TrainingError(
        f"{where} needs {size / 2**30:.2f} GiB, but {free / 2**30:.2f} GiB are free there. Free space, use a folder on "
        "another disk, or keep more in memory."
    )


def _allocate(descriptor: int, size: int) -> bool:
    """Make room; False where the disk is full. A system that cannot reserve space gets a file of that length."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return False
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(descriptor, size)
    except AttributeError:
        os.ftruncate(descriptor, size)
    return True


def _open_nameless(folder: Path) -> int:
    if _NAMELESS:
        try:
            return os.open(folder, os.O_RDWR | _NAMELESS, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                raise
    descriptor, name = tempfile.mkstemp(dir=folder, prefix="plait-")
    os.unlink(name)
    return descriptor


def _make_direct(descriptor: int) -> str:
    """Switch a file to direct I/O and try it on the first block; returns why that cannot be, or nothing."""
    if not _DIRECT:
        return "this system has no direct I/O"
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT)
        os.preadv(descriptor, [_memory(host_empty(ALIGNMENT, dtype=torch.uint8))], 0)
    except OSError as error:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return f"the file system refuses direct I/O ({error.strerror})"
    return ""
