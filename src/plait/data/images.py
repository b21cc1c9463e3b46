"""Pictures: a folder of them, and what is done to each on its way to a tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from plait.data.order import sample_seed
from plait.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp"})
"""Those that torchvision takes for images."""
FORMATS = ("PNG", "JPEG", "PPM", "BMP", "TIFF", "WEBP")
"""Pillow goes by content, not by the ending, and would hand PostScript to Ghostscript, which runs it."""
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class AugmentedImages(Dataset[dict[str, Tensor]]):
    """Images with labels, whose random changes depend on (seed, epoch, index) alone."""

    def __init__(self, *, augment: bool, seed: int) -> None:
        self.augment = augment
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """From here on the random changes are those of this epoch."""
        self._epoch = epoch

    def generator(self, index: int) -> np.random.Generator:
        """The random numbers of one sample in this epoch."""
        return np.random.default_rng(sample_seed(self._seed, self._epoch, index))


class ImageFolder(AugmentedImages):
    """`root/class_name/**/*.png|jpg|…`: classes are numbered in the order of their names.

    Training images are cut out at random (a part of 8 % to 100 %, up to 4:3 or 3:4) and mirrored half of the
    time; others are scaled and cut from the middle. Items are `image` (float32, 3 × size × size,
    normalised) and `label`.
    """

    def __init__(self, root: str | Path, *, size: int, augment: bool, seed: int = 0) -> None:
        super().__init__(augment=augment, seed=seed)
        _pillow()
        self.size = size
        folder = Path(root).expanduser()
        if not folder.is_dir():
            raise DataError(f"image folder {root} does not exist; give a folder with one folder a class")
        self.classes = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        try:
            found = [_images_below(folder / name) for name in self.classes]
        except OSError as error:
            raise DataError(f"image folder {error.filename} cannot be read: {error.strerror}") from error
        self._files = [(path, label) for label, paths in enumerate(found) for path in paths]
        empty = [name for name, paths in zip(self.classes, found, strict=True) if not paths]
        if empty and self._files:
            raise DataError(f"image folder {root}: the class {empty[0]} has no image; add some, or remove its folder")
        if not self._files:
            raise DataError(
                f"image folder {root} has {len(self.classes)} class folders and no image in them; "
                f"expected {root}/class_name/*{{{','.join(sorted(SUFFIXES))}}}"
            )

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        path, label = self._files[index]
        try:
            with _pillow().open(path, formats=FORMATS) as file:
                picture = file.convert("RGB")
        except Exception as error:  # decoders raise anything, and Pillow errors of its own for far too many pixels
            raise DataError(f"{path} cannot be read as an image: {error}; repair or remove it") from error
        if self.augment:
            pixels = _random_cut(picture, self.size, self.generator(index))
        else:
            pixels = _middle_cut(picture, self.size)
        return {
            "image": normalise(pixels, IMAGENET_MEAN, IMAGENET_STD),
            "label": torch.tensor(label, dtype=torch.int64),
        }


def _images_below(folder: Path) -> list[Path]:
    """Its images and those of the folders in it, less what is hidden."""
    below = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    return sorted(path for path in below if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def normalise(pixels: NDArray[np.uint8], mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Height × width × 3 bytes to a float32 tensor, channels first, of mean 0 and deviation 1 or so."""
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
    """The middle 7/8 of the shorter side, square, scaled: what ImageNet results are measured on."""
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
