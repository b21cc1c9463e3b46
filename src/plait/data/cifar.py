"""CIFAR-10 in the two forms in which it is published."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.data.images import AugmentedImages, normalise
from plait.errors import DataError

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
SIDE = 32
PIXELS = 3 * SIDE * SIDE
CLASSES = 10
PAD = 4

FILES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
FORMS = {".bin": "cifar-10-batches-bin", "": "cifar-10-batches-py"}
"""The suffix of the files in each form, and the folder they are published in."""


class Cifar10(AugmentedImages):
    """CIFAR-10, in its binary or its Python form, from the folder with the batches or the one above it.

    With `augment` images are moved by up to four pixels and mirrored half of the time. Items are `image`
    (float32, 3 × 32 × 32, normalised) and `label`.
    """

    def __init__(self, root: str | Path, *, split: Literal["train", "test"], augment: bool, seed: int = 0) -> None:
        super().__init__(augment=augment, seed=seed)
        parts = [_read_binary(p) if p.suffix == ".bin" else _read_pickle(p) for p in _find(Path(root), split)]
        labels = np.concatenate([part[0] for part in parts])
        if labels.size and (labels.min() < 0 or labels.max() >= CLASSES):
            raise DataError(f"{root}: labels go from {labels.min()} to {labels.max()}, CIFAR-10 has 0 to 9")
        self._labels = torch.from_numpy(labels)
        pixels = np.concatenate([part[1] for part in parts])
        self._images = np.ascontiguousarray(pixels.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pixels = self._images[index]
        if self.augment:
            random = self.generator(index)
            top, left = random.integers(0, 2 * PAD + 1, size=2)
            around = np.pad(pixels, ((PAD, PAD), (PAD, PAD), (0, 0)))
            pixels = around[top : top + SIDE, left : left + SIDE]
            if random.random() < 0.5:
                pixels = pixels[:, ::-1]
        return {"image": normalise(pixels, MEAN, STD), "label": self._labels[index]}


def _find(root: Path, split: str) -> list[Path]:
    root = root.expanduser()
    for suffix, folder in FORMS.items():
        for place in (root, root / folder):
            paths = [place / f"{name}{suffix}" for name in FILES[split]]
            missing = [path.name for path in paths if not path.is_file()]
            if not missing:
                return paths
            if len(missing) < len(paths):
                raise DataError(f"{place} has a part of CIFAR-10 only: {', '.join(missing)} missing")
    wanted = " or ".join(f"{FILES[split][0]}{suffix}" for suffix in FORMS)
    raise DataError(f"{root} has no CIFAR-10 in it: no {wanted} there, nor in {' or '.join(FORMS.values())}")


def _read_binary(path: Path) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    size = path.stat().st_size
    if size == 0 or size % (PIXELS + 1):
        raise DataError(
            f"{path}: {size} bytes, expected a multiple of {PIXELS + 1} (10000 records: {10000 * (PIXELS + 1)}); "
            "the file is damaged, get it again"
        )
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, PIXELS + 1)
    return records[:, 0].astype(np.int64), records[:, 1:]


def _read_pickle(path: Path) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    try:
        with path.open("rb") as file:
            found = _ArraysOnly(file, encoding="bytes").load()
        # Python 2 wrote the keys as bytes; somebody's Python 3 copy has strings.
        found = {key.decode() if isinstance(key, bytes) else key: value for key, value in found.items()}
        labels = np.asarray(found["labels"], dtype=np.int64)
        pixels = np.asarray(found["data"], dtype=np.uint8).reshape(len(labels), PIXELS)
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path} is not a batch of CIFAR-10's Python form: {error!r}; get it again") from error
    return labels, pixels


def _latin1(text: str, encoding: str) -> bytes:
    """How newer pickles spell bytes; no other codec is needed, so none is allowed."""
    if encoding != "latin1":
        raise DataError(f"a pickle asks for the codec {encoding!r}, which CIFAR-10 does not need")
    return text.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """Unpickles plain data and numpy arrays; anything else, which could run code, is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """The few names that an array is made of."""
        rebuild = np.empty(0).__reduce__()[0]
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): rebuild,
            ("numpy._core.multiarray", "_reconstruct"): rebuild,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _latin1,
        }
        if (module, name) not in allowed:
            raise DataError(
                f"a CIFAR-10 pickle asks for {module}.{name}; only arrays, numbers and texts are read, because "
                "anything else could run code. The file is not the published one"
            )
        return allowed[module, name]
