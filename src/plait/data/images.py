"""Image datasets: a folder of classes, and CIFAR-10."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from plait.config import IMAGENET_MEAN, IMAGENET_STD, MaskedImageObjective
from plait.data.order import sample_seed
from plait.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp"})
"""The suffixes of image files, as in torchvision."""
FORMATS = ("PNG", "JPEG", "PPM", "BMP", "TIFF", "WEBP")
"""The formats that Pillow may open. It detects them by content, not by suffix, and would pass PostScript to
Ghostscript, which runs programs in it."""


class MaskedPatches:
    """Chooses the patches of an image that are hidden, as in SimMIM."""

    def __init__(self, config: MaskedImageObjective) -> None:
        self._config = config

    def __call__(self, image: Tensor, random: np.random.Generator) -> Tensor:
        """Return, for each of the model's patches, row by row, whether it is hidden."""
        config, side = self._config, image.shape[-1]
        if config.hidden_side % config.patch_size or side % config.hidden_side:
            raise DataError(
                f"objective.mask_patch_size {config.hidden_side} is not a multiple of patch_size {config.patch_size}, "
                f"or images of {side} pixels are not of it; write a patch_size and mask_patch_size that divide {side}"
            )
        across = side // config.hidden_side
        hidden = np.zeros(across * across, dtype=bool)
        hidden[random.permutation(across * across)[: max(1, round(across * across * config.probability))]] = True
        times = config.hidden_side // config.patch_size
        return torch.from_numpy(hidden.reshape(across, across).repeat(times, 0).repeat(times, 1).ravel())


class AugmentedImages(Dataset[dict[str, Tensor]]):
    """Images with labels, whose augmentation and hidden patches depend on (seed, epoch, index) alone."""

    def __init__(self, *, augment: bool, seed: int, hide: MaskedPatches | None = None) -> None:
        self.augment = augment
        self._hide = hide
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Use the augmentation of this epoch."""
        self._epoch = epoch

    def generator(self, index: int) -> np.random.Generator:
        """Return the random generator of one sample in this epoch."""
        return np.random.default_rng(sample_seed(self._seed, self._epoch, index))

    def sample(self, image: Tensor, label: Tensor, index: int) -> dict[str, Tensor]:
        """Return the image with its label, or with its hidden patches."""
        if self._hide is None:
            return {"image": image, "label": label}
        random = np.random.default_rng(sample_seed(self._seed + 1, self._epoch, index))
        return {"image": image, "bool_masked_pos": self._hide(image, random)}


class ImageFolder(AugmentedImages):
    """`root/class_name/**/*.png|jpg|…`: classes are numbered in the order of their names.

    Training images are random resized crops (8 % to 100 % of the area, up to 4:3 or 3:4), flipped half of the time;
    others are scaled and center-cropped. Items are `image` (float32, 3 × size × size, normalised) and `label`.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        size: int,
        augment: bool,
        seed: int = 0,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        hide: MaskedPatches | None = None,
    ) -> None:
        super().__init__(augment=augment, seed=seed, hide=hide)
        _pillow()
        self._normal = (mean, std)
        self.size = size
        folder = Path(root).expanduser()
        if not folder.is_dir():
            raise DataError(f"image folder {root} does not exist; give a folder with one folder per class")
        self.classes = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        try:
            images = [_images_below(folder / name) for name in self.classes]
        except OSError as error:
            raise DataError(f"image folder {error.filename} cannot be read: {error.strerror}") from error
        self._files = [(path, label) for label, paths in enumerate(images) for path in paths]
        empty = [name for name, paths in zip(self.classes, images, strict=True) if not paths]
        if empty and self._files:
            raise DataError(f"image folder {root}: class {empty[0]!r} has no images; add some, or remove its folder")
        self.num_labels = len(self.classes) if hide is None else None
        """The number of outputs that a classifier needs."""
        if not self._files:
            raise DataError(
                f"image folder {root} has {len(self.classes)} class folders and no image in them; "
                f"expected {root}/class_name/*{{{','.join(sorted(SUFFIXES))}}}"
            )

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        path, label = self._files[index]
        picture = read_image(path)
        if self.augment:
            pixels = _random_cut(picture, self.size, self.generator(index))
        else:
            pixels = _middle_cut(picture, self.size)
        return self.sample(normalise(pixels, *self._normal), torch.tensor(label, dtype=torch.int64), index)


def read_image(path: Path) -> Image:
    """Return the picture of a file, in RGB; raise a `DataError` if it cannot be read."""
    try:
        with _pillow().open(path, formats=FORMATS) as file:
            picture: Image = file.convert("RGB")
    except Exception as error:  # decoders may raise anything, and Pillow refuses images with too many pixels
        raise DataError(f"{path} cannot be read as an image: {error}; repair or remove it") from error
    return picture


def square_image(path: Path, size: int, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return the middle of an image file, scaled to `size` × `size` and normalized."""
    picture = read_image(path)
    side = min(picture.size)
    left, top = ((length - side) / 2 for length in picture.size)
    return normalise(_resized(picture, size, size, (left, top, left + side, top + side)), mean, std)


def _images_below(folder: Path) -> list[Path]:
    """Return the images in a folder and its subfolders, except hidden ones, sorted."""
    below = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    return sorted(path for path in below if not any(name.startswith(".") for name in path.relative_to(folder).parts))


def normalise(pixels: NDArray[np.uint8], mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return height × width × 3 bytes as a float32 tensor, channels first, of about mean 0 and deviation 1."""
    scale = np.asarray([1.0 / (255.0 * s) for s in std], dtype=np.float32)
    shift = np.asarray([m / s for m, s in zip(mean, std, strict=True)], dtype=np.float32)
    return torch.from_numpy(np.ascontiguousarray((pixels * scale - shift).transpose(2, 0, 1)))


def _random_cut(picture: Image, size: int, random: np.random.Generator) -> NDArray[np.uint8]:
    width, height = picture.size
    area = width * height * random.uniform(0.08, 1.0)
    ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
    across = min(width, max(1, round(math.sqrt(area * ratio))))
    down = min(height, max(1, round(math.sqrt(area / ratio))))
    left = int(random.integers(0, width - across + 1))
    top = int(random.integers(0, height - down + 1))
    pixels = _resized(picture, size, size, (left, top, left + across, top + down))
    return pixels[:, ::-1] if random.random() < 0.5 else pixels


def _middle_cut(picture: Image, size: int) -> NDArray[np.uint8]:
    """Return the center crop of 7/8 of the shorter side, scaled: the usual ImageNet evaluation crop."""
    width, height = picture.size
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return _resized(picture, size, size, (left, top, left + side, top + side))


def _resized(picture: Image, width: int, height: int, box: tuple[float, float, float, float]) -> NDArray[np.uint8]:
    bilinear = _pillow().Resampling.BILINEAR
    return np.asarray(picture.resize((width, height), bilinear, box=box))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("Pillow", "an image folder", "images") from None
    return Image


# CIFAR-10 in the two forms in which it is published.


MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
SIDE = 32
PIXELS = 3 * SIDE * SIDE
CLASSES = 10
PAD = 4

FILES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
FORMS = {".bin": "cifar-10-batches-bin", "": "cifar-10-batches-py"}
"""The suffix of the files in each published form, and the folder that they are in."""


class Cifar10(AugmentedImages):
    """CIFAR-10, in its binary or its Python form, from the folder with the batches or the one above it.

    With `augment` images are shifted by up to four pixels and flipped half of the time. Items are `image`
    (float32, 3 × 32 × 32, normalised) and `label`.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        split: Literal["train", "test"],
        augment: bool,
        seed: int = 0,
        hide: MaskedPatches | None = None,
    ) -> None:
        super().__init__(augment=augment, seed=seed, hide=hide)
        batches = [_read_binary(p) if p.suffix == ".bin" else _read_pickle(p) for p in _find_batches(Path(root), split)]
        labels = np.concatenate([batch[0] for batch in batches])
        if labels.size and (labels.min() < 0 or labels.max() >= CLASSES):
            raise DataError(f"{root}: labels go from {labels.min()} to {labels.max()}, CIFAR-10 has 0 to 9")
        self._labels = torch.from_numpy(labels)
        self.num_labels = CLASSES if hide is None else None
        """The number of outputs that a classifier needs."""
        pixels = np.concatenate([batch[1] for batch in batches])
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
        return self.sample(normalise(pixels, MEAN, STD), self._labels[index], index)


def _find_batches(root: Path, split: str) -> list[Path]:
    root = root.expanduser()
    for suffix, folder in FORMS.items():
        for directory in (root, root / folder):
            paths = [directory / f"{name}{suffix}" for name in FILES[split]]
            missing = [path.name for path in paths if not path.is_file()]
            if not missing:
                return paths
            if len(missing) < len(paths):
                raise DataError(f"{directory} has only some files of CIFAR-10: {', '.join(missing)} missing")
    wanted = " or ".join(f"{FILES[split][0]}{suffix}" for suffix in FORMS)
    raise DataError(f"{root} does not contain CIFAR-10: no {wanted} there, nor in {' or '.join(FORMS.values())}")


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
            batch = _ArraysOnly(file, encoding="bytes").load()
        # Python 2 wrote the keys as bytes; a copy written by Python 3 has strings.
        batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        labels = np.asarray(batch["labels"], dtype=np.int64)
        pixels = np.asarray(batch["data"], dtype=np.uint8).reshape(len(labels), PIXELS)
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path} is not a batch of CIFAR-10's Python form: {error!r}; get it again") from error
    return labels, pixels


def _latin1(text: str, encoding: str) -> bytes:
    """Return the bytes that a newer pickle stores as latin-1 text; any other codec raises a `DataError`."""
    if encoding != "latin1":
        raise DataError(f"a pickle asks for the codec {encoding!r}, which CIFAR-10 does not need")
    return text.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """Unpickles plain data and numpy arrays; refuses anything else, which could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few classes and functions that an array is made with."""
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
