"""Pictures: folders and CIFAR-10."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.refusals import refused

from plait.config.train import ResolvedBatch
from plait.data import RankLoader
from plait.data.images import IMAGENET_MEAN, IMAGENET_STD, MEAN, STD, Cifar10, ImageFolder
from plait.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(random.randrange(2**32))
    for name, size in [("cat/1.png", (40, 30)), ("cat/2.jpg", (16, 50)), ("ant/x.PNG", (9, 9))]:
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
    (tmp_path / "pictures" / "cat" / "notes.txt").write_text("not a picture")
    return tmp_path / "pictures"


def test_a_folder_is_one_class_a_folder_in_the_order_of_names(folder: Path) -> None:
    images = ImageFolder(folder, size=24, augment=False)
    assert images.classes == ["ant", "cat"]
    assert [images[i]["label"].item() for i in range(len(images))] == [0, 1, 1]
    for index in range(3):
        image = images[index]["image"]
        assert (image.dtype, tuple(image.shape)) == (torch.float32, (3, 24, 24))
        assert image.is_contiguous()


def test_pixels_are_normalised_by_channel(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (20, 20), (255, 0, 51)).save(tmp_path / "a" / "flat.png")
    image = ImageFolder(tmp_path, size=8, augment=False)[0]["image"]
    expected = [(v - m) / s for v, m, s in zip((1.0, 0.0, 0.2), IMAGENET_MEAN, IMAGENET_STD, strict=True)]
    torch.testing.assert_close(image.mean((1, 2)), torch.tensor(expected))
    assert image.std((1, 2)).max() < 1e-6


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_depends_on_seed_epoch_and_sample_alone(folder: Path, workers: int) -> None:
    def pictures(epoch: int, *, ranks: int, micro: int, workers: int, seed: int = 1) -> dict[int, list[bytes]]:
        found: dict[int, list[bytes]] = {}
        for rank in range(ranks):
            dataset = ImageFolder(folder, size=12, augment=True, seed=seed)
            batch = ResolvedBatch(ranks * micro, micro, 1)
            loader = RankLoader(dataset, rank=rank, ranks=ranks, batch=batch, seed=0, shuffle=True, workers=workers)
            for part in (part for step in loader.epoch(epoch) for part in step if part.samples):
                for image, label in zip(part.inputs["image"], part.inputs["label"], strict=True):
                    found.setdefault(int(label), []).append(image.numpy().tobytes())
            loader.close()
        return {label: sorted(images) for label, images in found.items()}

    alone = pictures(1, ranks=1, micro=3, workers=0)
    assert pictures(1, ranks=2, micro=1, workers=workers) == alone
    assert pictures(2, ranks=1, micro=3, workers=workers) != alone
    assert pictures(1, ranks=1, micro=3, workers=0, seed=2) != alone


def test_a_picture_is_read_as_png_or_jpeg_whatever_it_holds(folder: Path) -> None:
    """Pillow would hand PostScript to Ghostscript, a program that runs what is in it."""
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    (folder / "cat" / "1.png").write_bytes(postscript)
    with refused(DataError, folder / "cat" / "1.png", "cannot identify image file"):
        ImageFolder(folder, size=8, augment=False)[1]


def test_a_broken_or_missing_picture_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "cat" / "1.png").write_bytes(b"no picture")
    with refused(DataError, folder / "cat" / "1.png", "cannot identify image file"):
        ImageFolder(folder, size=8, augment=False)[1]
    with refused(DataError, tmp_path / "nowhere"):
        ImageFolder(tmp_path / "nowhere", size=8, augment=False)
    (tmp_path / "empty" / "class").mkdir(parents=True)
    with refused(DataError, tmp_path / "empty", "1", "class_name/*{.bmp"):
        ImageFolder(tmp_path / "empty", size=8, augment=False)


def cifar(root: Path, form: str) -> tuple[np.ndarray, np.ndarray]:
    """A small CIFAR-10 of random pictures, 4 to a batch."""
    rng = np.random.default_rng(random.randrange(2**32))
    labels, pixels = rng.integers(0, 10, 24), rng.integers(0, 256, (24, 3072), dtype=np.uint8)
    root.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate([f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]):
        part = slice(4 * number, 4 * number + 4)
        if form == "bin":
            records = np.concatenate([labels[part, None].astype(np.uint8), pixels[part]], axis=1)
            records.tofile(root / f"{name}.bin")
        else:
            batch = {b"labels": labels[part].tolist(), b"data": pixels[part], b"batch_label": b"x"}
            (root / name).write_bytes(pickle.dumps(batch, protocol=int(form)))
    return labels, pixels


@pytest.mark.parametrize("form", ["bin", "0", "2", "4"])
def test_cifar_is_read_from_each_of_its_forms(tmp_path: Path, form: str) -> None:
    place = tmp_path / ("cifar-10-batches-bin" if form == "bin" else "cifar-10-batches-py")
    labels, pixels = cifar(place, form)
    for root in (tmp_path, place):
        train = Cifar10(root, split="train", augment=False)
        test = Cifar10(root, split="test", augment=False)
        assert (len(train), len(test)) == (20, 4)
    for index, item in [(7, train[7]), (22, test[2])]:
        assert item["label"].item() == labels[index]
        assert item["label"].dtype == torch.int64
        picture = torch.from_numpy(pixels[index].reshape(3, 32, 32) / 255.0)
        expected = (picture - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
        torch.testing.assert_close(item["image"], expected.float())


def test_augmented_cifar_changes_with_the_epoch_and_comes_back_with_it(tmp_path: Path) -> None:
    cifar(tmp_path, "bin")
    train = Cifar10(tmp_path, split="train", augment=True, seed=3)
    views = []
    for epoch in (0, 1, 2, 0):
        train.set_epoch(epoch)
        views.append(torch.stack([train[i]["image"] for i in range(20)]))
    assert torch.equal(views[0], views[3])
    assert not torch.equal(views[0], views[1])
    assert views[0].shape == (20, 3, 32, 32)


def test_a_damaged_or_partial_cifar_is_named(tmp_path: Path) -> None:
    with refused(DataError, tmp_path, "data_batch_1.bin", "cifar-10-batches-py"):
        Cifar10(tmp_path, split="train", augment=False)
    cifar(tmp_path, "bin")
    with (tmp_path / "test_batch.bin").open("ab") as file:
        file.write(b"x")
    with refused(DataError, tmp_path / "test_batch.bin", "12293", "3073"):
        Cifar10(tmp_path, split="test", augment=False)
    (tmp_path / "data_batch_3.bin").unlink()
    with refused(DataError, tmp_path, "data_batch_3.bin"):
        Cifar10(tmp_path, split="train", augment=False)


class Malicious:
    def __init__(self, victim: Path) -> None:
        self._victim = victim

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self._victim,)


def test_a_pickle_cannot_run_code(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"labels": Malicious(victim)}))
    with refused(DataError, "pathlib.Path.touch"):
        Cifar10(tmp_path, split="test", augment=False)
    assert not victim.exists()
    (tmp_path / "test_batch").write_bytes(b"garbage")
    with refused(DataError, tmp_path / "test_batch", "UnpicklingError"):
        Cifar10(tmp_path, split="test", augment=False)


@pytest.mark.parametrize("content", ["bomb", "garbage", "half"])
def test_an_image_that_a_decoder_refuses_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    path = folder / "ant" / "x.PNG"
    if content == "bomb":
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30)  # of its 81
    else:
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40) if content == "garbage" else path.read_bytes()[:60])
    with refused(DataError, path):
        ImageFolder(folder, size=24, augment=False)[0]


def test_every_image_of_a_class_counts_and_a_class_without_one_is_named(folder: Path) -> None:
    before = len(ImageFolder(folder, size=8, augment=False))
    (folder / "cat" / "more").mkdir()
    picture = Image.fromarray(np.zeros((9, 9, 3), dtype=np.uint8))
    for name in ("cat/more/3.webp", "cat/4.bmp", "cat/._5.png"):
        picture.save(folder / name)
    found = ImageFolder(folder, size=8, augment=False)
    assert len(found) == before + 2
    (folder / "dog").mkdir()
    with refused(DataError, folder, "dog"):
        ImageFolder(folder, size=8, augment=False)
