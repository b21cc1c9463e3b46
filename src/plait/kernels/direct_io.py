"""Tensors in files: direct I/O with several requests at the same time.

[Note: direct I/O from threads] Where the file system allows it (`O_DIRECT`), a request bypasses the page cache, so it
needs neither memory for the cache nor a copy. It must then consist of whole, aligned blocks. `preadv` and `pwritev`
release the GIL, so a few threads keep a disk as busy as an asynchronous interface (libaio, io_uring) would, without a
compiled extension or a minimum version of Linux. A tensor that is not aligned is copied through an aligned buffer; each
thread has one, so their memory is bounded.
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
"""The number of requests at the same time, and of threads."""
REQUEST_BYTES = 1 << 20
"""A transfer is cut into requests of this size, so that a single large one keeps the disk busy too."""

_DIRECT = getattr(os, "O_DIRECT", 0)  # both exist on Linux only; elsewhere: page cache, and a named file
_NAMELESS = getattr(os, "O_TMPFILE", 0)


class FileTransfer:
    """A read or write of one tensor in progress. The tensor must be neither read nor written before `wait` returns."""

    def __init__(self, workers: list[Future[None]]) -> None:
        self._workers = workers

    def wait(self) -> None:
        """Block until all requests have ended; raises the error of one that failed."""
        wait(self._workers)
        for worker in self._workers:
            worker.result()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(worker.done() for worker in self._workers)


class FileQueue:
    """The threads that copy tensors between host memory and files. Any number of files can share one."""

    def __init__(self, *, in_flight: int = IN_FLIGHT, request_bytes: int = REQUEST_BYTES) -> None:
        assert request_bytes % ALIGNMENT == 0, "requests are made of whole blocks"
        self.request_bytes = request_bytes
        self._in_flight = in_flight
        self._threads = ThreadPoolExecutor(in_flight, thread_name_prefix="plait-files")
        self._local = threading.local()

    def submit(self, work: Callable[[], None], *, times: int) -> list[Future[None]]:
        """Run `work` in up to `times` threads, and return the futures. Earlier calls get free threads first."""
        return [self._threads.submit(work) for _ in range(min(times, self._in_flight))]

    def bounce(self, size: int) -> Tensor:
        """Return the first `size` bytes of the calling thread's aligned buffer."""
        buffer: Tensor | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = host_empty(self.request_bytes, dtype=torch.uint8)
        return buffer[:size]

    def close(self) -> None:
        """Finish all requests and end the threads."""
        self._threads.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()


class TensorFile:
    """A file of fixed size that holds tensors at offsets that the caller chooses.

    Offsets are multiples of `ALIGNMENT`, and a tensor occupies `rounded(bytes)`. The space is reserved when the file is
    created: where the disk is too small, that raises a `TrainingError`, rather than a write in the middle of a run.
    """

    def __init__(self, queue: FileQueue, descriptor: int, size: int, where: str, buffered_because: str) -> None:
        """Wrap an open file; call `scratch` or `at` instead, which open one."""
        self.size = size
        self.where = where
        self.buffered_because = buffered_because
        """Why requests go through the page cache; empty for direct I/O."""
        self._queue = queue
        self._file = descriptor

    @classmethod
    def scratch(cls, queue: FileQueue, folder: Path, size: int) -> Self:
        """Return a new file without a name; its space is freed when the process ends, even if it is killed."""
        folder.mkdir(parents=True, exist_ok=True)
        return cls._reserve(queue, _open_nameless(folder), folder, f"{folder}/(scratch)", size)

    @classmethod
    def at(cls, queue: FileQueue, path: Path, size: int) -> Self:
        """Open or create the file `path`, extend it to at least `size` bytes, and return it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        return cls._reserve(queue, os.open(path, os.O_RDWR | os.O_CREAT, 0o600), path.parent, str(path), size)

    @classmethod
    def _reserve(cls, queue: FileQueue, descriptor: int, folder: Path, where: str, size: int) -> Self:
        size = rounded(size)
        try:
            missing = size - os.fstat(descriptor).st_blocks * 512
            free = shutil.disk_usage(folder).free
            if missing > free:
                raise _disk_full(where, size, free)
            if missing > 0 and not _allocate(descriptor, size):
                raise _disk_full(where, size, shutil.disk_usage(folder).free)
            return cls(queue, descriptor, size, where, _make_direct(descriptor))
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def direct(self) -> bool:
        """Whether requests bypass the page cache."""
        return not self.buffered_because

    @property
    def descriptor(self) -> int:
        """The file descriptor, to map the file into memory."""
        return self._file

    def read_into(self, tensor: Tensor, at: int) -> FileTransfer:
        """Start to fill a contiguous CPU tensor with the bytes of the file from `at` on; return the transfer."""
        return self._move(tensor, at, self._read)

    def write_from(self, tensor: Tensor, at: int) -> FileTransfer:
        """Start to write a contiguous CPU tensor to the bytes of the file from `at` on; return the transfer."""
        return self._move(tensor, at, self._write)

    def close(self) -> None:
        """Close the file. All transfers must have ended."""
        os.close(self._file)

    def _move(self, tensor: Tensor, at: int, request: Callable[[Tensor, int], None]) -> FileTransfer:
        assert tensor.device.type == "cpu", "transfers are between files and host memory"
        assert tensor.is_contiguous(), "transfers take contiguous tensors"
        # `as_strided`, since a dim of size 1 may have any stride in a contiguous tensor, which `view` refuses.
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        assert at % ALIGNMENT == 0, f"byte {at} is not the beginning of a block"
        assert at + flat.numel() <= self.size, f"{self.where} ends at byte {self.size}"
        step = self._queue.request_bytes
        offsets = iter(range(0, flat.numel(), step))

        def work() -> None:
            for begin in offsets:  # each thread takes the next one
                request(flat[begin : begin + step], at + begin)

        return FileTransfer(self._queue.submit(work, times=-(-flat.numel() // step)))

    def _fits(self, chunk: Tensor) -> bool:
        return not self.direct or (chunk.data_ptr() % ALIGNMENT == 0 and chunk.numel() % ALIGNMENT == 0)

    def _read(self, chunk: Tensor, at: int) -> None:
        if self._fits(chunk):
            self._fill(chunk, at)
        else:
            buffer = self._queue.bounce(rounded(chunk.numel()))
            self._fill(buffer, at)
            chunk.copy_(buffer[: chunk.numel()])

    def _write(self, chunk: Tensor, at: int) -> None:
        if not self._fits(chunk):
            buffer = self._queue.bounce(rounded(chunk.numel()))
            buffer[: chunk.numel()].copy_(chunk)
            chunk = buffer
        self._drain(chunk, at)

    def _fill(self, chunk: Tensor, at: int) -> None:
        data, begin = _bytes_of(chunk), at
        while len(data):
            try:
                count = os.preadv(self._file, [data], at)
            except OSError as error:
                raise self._failed("read", len(data), at, error) from error
            if count == 0:
                raise TrainingError(
                    f"{self.where} ends at byte {os.fstat(self._file).st_size}, but {chunk.numel()} bytes were to be "
                    f"read from {begin}: another process truncated the file while it was in use"
                )
            data, at = data[count:], at + count

    def _drain(self, chunk: Tensor, at: int) -> None:
        data = _bytes_of(chunk)
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


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def _disk_full(where: str, size: int, free: int) -> TrainingError:
    return TrainingError(
        f"{where} needs {size / 2**30:.2f} GiB, but {free / 2**30:.2f} GiB are free there. Free space, use a folder on "
        "another disk, or keep more in memory."
    )


def _allocate(descriptor: int, size: int) -> bool:
    """Reserve space; return False where the disk is full. If the file system cannot reserve, only set the length."""
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
    """Switch a file to direct I/O and read its first block; return why that failed, or an empty string."""
    if not _DIRECT:
        return "this system has no direct I/O"
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT)
        os.preadv(descriptor, [_bytes_of(host_empty(ALIGNMENT, dtype=torch.uint8))], 0)
    except OSError as error:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return f"the file system refuses direct I/O ({error.strerror})"
    return ""
