"""Real images that come with a package: 1,797 handwritten digits of 8x8 pixels."""

import numpy as np
from numpy.typing import NDArray

from launcher.data.extras import imported
from launcher.data.text import check_split, select
from launcher.errors import DataError

BRIGHTEST = 16.0
"""The largest value of a pixel as scikit-learn gives it."""


class Digits:
    """The test part of the Optical Recognition of Handwritten Digits set (Alpaydin and Kaynak 1998), ten classes.

    Args:
        split: `train` or `validation`; None: all.
        holdout: the share of the images that validation is made of, chosen by a hash.
        shift: moves each image by up to so many pixels each way, drawn anew in every epoch; 0: as it is.

    Raises:
        DataError: scikit-learn is missing, or arguments that can't work.
    """

    def __init__(self, split: str | None = "train", holdout: float = 0.1, shift: int = 0) -> None:
        check_split(split, holdout)
        if isinstance(shift, bool) or not isinstance(shift, int) or not 0 <= shift < 8:
            raise DataError(f"shift={shift}: must be a whole number of pixels from 0 to 7")
        self.shift = shift
        loaded = imported("sklearn.datasets", "images").load_digits()
        chosen = select([str(index) for index in range(len(loaded.images))], split, holdout)
        self._images: NDArray[np.float32] = (loaded.images[chosen, None] / BRIGHTEST).astype(np.float32)
        self._labels: NDArray[np.int64] = loaded.target[chosen].astype(np.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], int]:
        """An image, float32 [1, 8, 8] from 0 to 1, and its digit."""
        image = self._images[index]
        if self.shift:
            down, right = np.random.randint(-self.shift, self.shift + 1, size=2)
            image = shifted(image, int(down), int(right))
        return image, int(self._labels[index])


def shifted(image: NDArray[np.float32], down: int, right: int) -> NDArray[np.float32]:
    """`image` [C, H, W] moved by whole pixels; zeros come in from outside."""
    moved = np.roll(image, (down, right), axis=(1, 2))
    height, width = image.shape[1:]
    moved[:, : max(down, 0)] = 0
    moved[:, height + min(down, 0) :] = 0
    moved[:, :, : max(right, 0)] = 0
    moved[:, :, width + min(right, 0) :] = 0
    return moved
