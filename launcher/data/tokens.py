"""Files of token ids that stay on the disk and are cut into samples."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher.data.text import check_split
from launcher.errors import DataError

DTYPES = {"uint16": "<u2", "uint32": "<u4"}
SUFFIXES = (".bin", ".npy")
SCANNED_AT_ONCE = 1 << 24
"""Tokens held in memory while document separators are looked for."""

Ids = NDArray[np.unsignedinteger[Any]]
Positions = NDArray[np.int64]


class Tokens:
    """Samples of up to `length` predictions, one after another from memory-mapped files.

    With `overlap` a sample begins with the last token of the one before and so has up to length + 1 tokens: a task
    that predicts each token of a sample from those before it (`task.bos=null`) then sees `length` inputs, and every
    token but the first of a file or document is predicted once. Without it samples share nothing, for a task that puts
    a `bos` before each. The last sample of a file or document may be shorter; one with nothing to predict is left out.

    What is held out for validation is the end of each file, in whole samples or documents.

    Args:
        path: a .bin file (ids one after another, little-endian, no header), a .npy file (one dimension), a folder with
            such files, read with its sub-folders in the order of the paths, or a list of these.
        length: inputs of a sample.
        dtype: of .bin files, `uint16` or `uint32`.
        split: `train` leaves out what is held out, `validation` is that alone; None: all.
        holdout: the share that is held out, at least one sample or document.
        boundaries: no sample crosses a document's end. Files are then read once from end to end to find them.
        document_separator: id that ends each document; it belongs to that document.
        overlap: whether a sample begins with the last token of the one before.
        vocab_size: ids are in [0, vocab_size), checked as samples are read; None: not checked.

    Attributes:
        lengths: tokens of each sample, int32 [samples].

    Raises:
        DataError: nothing there, an empty file or one that can't hold such ids; names the file.
    """

    def __init__(
        self,
        path: str | Sequence[str],
        length: int,
        dtype: str = "uint16",
        split: str | None = None,
        holdout: float = 0.1,
        boundaries: bool = False,
        document_separator: int | None = None,
        overlap: bool = True,
        vocab_size: int | None = None,
    ) -> None:
        check_split(split, holdout)
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise DataError(f"length={length}: must be a whole number of at least 1")
        if dtype not in DTYPES:
            raise DataError(f"dtype={dtype}: must be {' or '.join(DTYPES)}")
        if boundaries != (document_separator is not None):
            raise DataError(
                f"boundaries={boundaries}, document_separator={document_separator}: samples stop at the ends of "
                "documents where boundaries=true and document_separator is the id that ends each"
            )
        self.length, self.vocab_size = length, vocab_size
        self._dtype, self._overlap = dtype, int(overlap)
        self._files = _find([path] if isinstance(path, str) else path)
        self._maps: dict[int, Ids] = {}
        sizes = [len(self._map(file)) for file in range(len(self._files))]
        self._cuts = []
        for file, size in enumerate(sizes):
            starts, stops = np.array([0]), np.array([size])
            if document_separator is not None:
                starts, stops = _documents(self._map(file), document_separator)
            self._cuts.append(_Cuts(starts, stops, length, self._overlap, by_document=boundaries))
        held_out = _held_out([cuts.num_units for cuts in self._cuts], holdout)
        self._chosen = [cuts.chosen(split, held) for cuts, held in zip(self._cuts, held_out, strict=True)]
        self._ends: Positions = np.cumsum([len(chosen) for chosen in self._chosen])
        if len(self) == 0:
            part = f"the {split} part of {path}" if split else f"{path}"
            raise DataError(f"{part} holds nothing to predict ({sum(sizes)} tokens in {len(sizes)} file(s))")

    def __len__(self) -> int:
        return int(self._ends[-1])

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        parts = zip(self._cuts, self._chosen, strict=True)
        return np.concatenate([cuts.lengths()[chosen.start : chosen.stop] for cuts, chosen in parts])

    def __getitem__(self, index: int) -> Ids:
        """The tokens of one sample, [at most length + overlap], in the file's type.

        Raises:
            DataError: an id outside the vocabulary; names the file.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        file = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[file - 1]) if file else 0
        start, stop = self._cuts[file].span(self._chosen[file][index - before])
        ids: Ids = np.array(self._map(file)[start:stop])
        self._check(ids, f"{self._files[file]}", start)
        return ids

    def _check(self, ids: Ids, file: str, start: int) -> None:
        if self.vocab_size is None:
            return
        wrong = (ids < 0) | (ids >= self.vocab_size)
        if wrong.any():
            position = int(wrong.argmax())
            raise DataError(
                f"{file}: token {ids[position]} at position {start + position} is outside the vocabulary: 0 to "
                f"{self.vocab_size - 1}" + f" (is it a file of {self._dtype}?)" * file.endswith(".bin")
            )

    def __getstate__(self) -> dict[str, Any]:
        # a mapped file would travel to another process as a copy of all its bytes
        return {**self.__dict__, "_maps": {}}

    def _map(self, file: int) -> Ids:
        if file not in self._maps:
            self._maps[file] = _mapped(self._files[file], self._dtype)
        return self._maps[file]


class _Cuts:
    """The samples of one file: each stretch (the whole file, or a document) in pieces of `length`."""

    def __init__(self, starts: Positions, stops: Positions, length: int, overlap: int, *, by_document: bool) -> None:
        self._length, self._overlap, self._by_document = length, overlap, by_document
        counts = -(-np.maximum(stops - starts - overlap, 0) // length)
        kept = counts > 0
        self._starts, self._stops, self._counts = starts[kept], stops[kept], counts[kept]
        self._ends: Positions = np.cumsum(self._counts)
        self.num_samples = int(self._counts.sum())
        self.num_units = len(self._counts) if by_document else self.num_samples
        """What is held out as a whole: documents, or samples where documents aren't known."""

    def chosen(self, split: str | None, held_out: int) -> range:
        """The samples of a split, where the last `held_out` units are held out."""
        border = self.num_units - held_out
        if self._by_document:
            border = int(self._ends[border - 1]) if border else 0
        first = border if split == "validation" else 0
        return range(first, border if split == "train" else self.num_samples)

    def span(self, index: int) -> tuple[int, int]:
        """Where sample `index` starts and stops in the file."""
        stretch = int(np.searchsorted(self._ends, index, side="right"))
        piece = index - int(self._ends[stretch] - self._counts[stretch])
        start = int(self._starts[stretch]) + piece * self._length
        return start, min(start + self._length + self._overlap, int(self._stops[stretch]))

    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sample."""
        found = np.full(self.num_samples, self._length + self._overlap, dtype=np.int32)
        found[self._ends - 1] = self._stops - self._starts - (self._counts - 1) * self._length
        return found


def _held_out(units: Sequence[int], holdout: float) -> list[int]:
    """How many of each file's units are held out: the share of all of them, at least one and never the only one."""
    total = sum(units)
    wanted = min(max(round(total * holdout), int(holdout > 0.0)), max(total - 1, 0))
    # rounded on the running sum, so that many small files give their share too
    shares = [0, *(wanted * so_far // max(total, 1) for so_far in accumulate(units))]
    return [after - before for before, after in pairwise(shares)]


def _documents(ids: Ids, separator: int) -> tuple[Positions, Positions]:
    """Where each document starts and stops; what follows the last separator is one too."""
    found = [
        start + np.flatnonzero(ids[start : start + SCANNED_AT_ONCE] == separator)
        for start in range(0, len(ids), SCANNED_AT_ONCE)
    ]
    stops = np.concatenate(found) + 1
    if not len(stops) or stops[-1] < len(ids):
        stops = np.append(stops, len(ids))
    return np.concatenate(([0], stops[:-1])), stops


def _find(paths: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for root in (Path(path).expanduser() for path in paths):
        if root.is_dir():
            inside = sorted(one for one in root.rglob("*") if one.suffix in SUFFIXES and one.is_file())
            inside = [one for one in inside if not any(part.startswith(".") for part in one.relative_to(root).parts)]
            if not inside:
                raise DataError(f"{root} has no file that ends with {' or '.join(SUFFIXES)}")
            files += inside
        elif root.is_file():
            files.append(root)
        else:
            raise DataError(f"{root} isn't there")
    if not files:
        raise DataError("path=[]: names no file")
    return files


def _mapped(file: Path, dtype: str) -> Ids:
    try:
        if file.suffix == ".npy":
            ids: Ids = np.load(file, mmap_mode="r")
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise DataError(f"{file} must hold one dimension of integers, not {ids.ndim} of {ids.dtype}")
        else:
            size, each = file.stat().st_size, np.dtype(DTYPES[dtype]).itemsize
            if size % each:
                raise DataError(f"{file} has {size} bytes, no multiple of the {each} of dtype={dtype}")
            ids = np.memmap(file, dtype=DTYPES[dtype], mode="r") if size else np.empty(0, DTYPES[dtype])
    except (OSError, ValueError) as error:
        raise DataError(f"{file} can't be read as token ids: {error}") from error
    if not len(ids):
        raise DataError(f"{file} is empty")
    return ids
