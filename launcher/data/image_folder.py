"""A folder of images, one sub-folder a class."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher.data.extras import imported
from launcher.data.text import check_split, select
from launcher.errors import DataError

SUFFIXES = (".jpeg", ".jpg", ".png")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP_AREA, CROP_RATIO, CROP_TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
"""A training crop: its share of the image's area and its width over its height (Szegedy et al. 2014, section 6)."""

Box = tuple[float, float, float, float]


class ImageFolder:
    """The images of `path/CLASS/`, in the order of classes and names; a class's label is its place in that order.

    Files that end with .png, .jpg or .jpeg count; names that start with a dot don't. An image becomes three colours,
    its shorter side `resize` pixels and of that the middle `size` x `size`. With `augment` it is instead a random part
    of the image, scaled to `size` x `size` and mirrored half the time, drawn anew in every epoch.

    Args:
        path: the folder.
        size: side of what the model sees, in pixels.
        resize: shorter side before the crop; None: size x 256 / 224.
        augment: random part and mirroring, for training.
        split: `train` leaves out what is held out, `validation` is that alone; None: all.
        holdout: the share of the images that is held out, chosen by a hash of their names.
        classes_folder: the folder whose sub-folders are the classes, where `path` may lack some; None: `path`.
        mean, std: of each colour from 0 to 1, taken off and divided by.

    Attributes:
        classes: names of the classes, by label.

    Raises:
        DataError: Pillow is missing, no such folder, no classes or no images in it, or a class that isn't one.
    """

    def __init__(
        self,
        path: str,
        size: int = 224,
        resize: int | None = None,
        augment: bool = False,
        split: str | None = None,
        holdout: float = 0.1,
        classes_folder: str | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        check_split(split, holdout)
        self.size = size
        self.resize = round(size * 256 / 224) if resize is None else resize
        if not 1 <= size <= self.resize:
            raise DataError(f"size={size}, resize={resize}: a crop needs at least 1 pixel and fits into the whole")
        self._mean, self._std = (_by_channel(name, values) for name, values in (("mean", mean), ("std", std)))
        if not bool((self._std > 0).all()):
            raise DataError(f"std={list(std)}: must be above 0")
        imported("PIL.Image", "images")
        self.augment = augment
        root = Path(path).expanduser()
        self.classes = _classes(root if classes_folder is None else Path(classes_folder).expanduser())
        self._root = root
        files = _images(root, self.classes)
        self._files = [files[index] for index in select([name for name, _ in files], split, holdout)]
        if not self._files:
            part = f"the {split} part of {root}" if split else f"{root}"
            raise DataError(f"{part} holds no image ({', '.join(SUFFIXES)}) in a folder of its class")

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], int]:
        """An image, float32 [3, size, size] with `mean` taken off and divided by `std`, and its label.

        Raises:
            DataError: the file can't be read as an image; names it.
        """
        name, label = self._files[index]
        image = _open(self._root / name)
        if self.augment:
            image = self._scaled(image, random_box(image.width, image.height))
            mirrored = np.random.random() < 0.5
        else:
            image = self._scaled(image, middle_box(image.width, image.height, self.size / self.resize))
            mirrored = False
        pixels = np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / np.float32(255)
        if mirrored:
            pixels = pixels[:, :, ::-1]
        return np.ascontiguousarray((pixels - self._mean) / self._std), label

    def _scaled(self, image: Any, box: Box) -> Any:
        bilinear = imported("PIL.Image", "images").Resampling.BILINEAR
        return image.resize((self.size, self.size), bilinear, box=box)


def middle_box(width: int, height: int, share: float) -> Box:
    """Left, top, right and bottom of the square in the middle whose side is `share` of the shorter side."""
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int) -> Box:
    """Left, top, right and bottom of a random part of an image, from NumPy's global generator."""
    for _ in range(CROP_TRIES):
        area = width * height * np.random.uniform(*CROP_AREA)
        ratio = math.exp(np.random.uniform(math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1])))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left = np.random.randint(0, width - across + 1)
            top = np.random.randint(0, height - down + 1)
            return left, top, left + across, top + down
    return middle_box(width, height, 1.0)


def _open(file: Path) -> Any:
    pillow = imported("PIL.Image", "images")
    try:
        with pillow.open(file) as opened:
            return opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise DataError(f"{file} can't be read as an image: {error}") from error


def _classes(root: Path) -> list[str]:
    if not root.is_dir():
        raise DataError(f"{root} isn't a folder" if root.exists() else f"{root} isn't there")
    names = sorted(one.name for one in root.iterdir() if one.is_dir() and not one.name.startswith("."))
    if not names:
        raise DataError(f"{root} has no sub-folder: images stand in one folder for each class, as in {root}/cat/1.png")
    return names


def _images(root: Path, classes: Sequence[str]) -> list[tuple[str, int]]:
    labels = {name: label for label, name in enumerate(classes)}
    found = []
    for name in _classes(root):
        if name not in labels:
            raise DataError(f"{root / name} is no class: those are {', '.join(classes[:20])}")
        files = (one.name for one in (root / name).iterdir() if one.suffix.lower() in SUFFIXES)
        found += [(f"{name}/{file}", labels[name]) for file in sorted(files) if not file.startswith(".")]
    return found


def _by_channel(name: str, values: Sequence[float]) -> NDArray[np.float32]:
    if len(values) != 3:
        raise DataError(f"{name}={list(values)}: must be three numbers, one for each colour")
    return np.array(values, dtype=np.float32)[:, None, None]
