"""A user's own text as samples of bytes, and what every set of text shares."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launcher.errors import DataError, nearest

SPLITS = ("train", "validation")
JSONL_SUFFIXES = (".jsonl", ".ndjson")


class ByteSamples:
    """A map-style set of byte strings, held as one block of memory.

    Attributes:
        lengths: bytes of each sample, int64 [samples]; known without reading a sample.
    """

    def __init__(self, samples: Iterable[bytes]) -> None:
        block = bytearray()
        lengths = []
        for sample in samples:
            block += sample
            lengths.append(len(sample))
        self.lengths: NDArray[np.int64] = np.array(lengths, dtype=np.int64)
        self._bytes = np.frombuffer(block, dtype=np.uint8)
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        """The bytes of one sample, uint8 [length]."""
        end = int(self._ends[index])
        return self._bytes[end - int(self.lengths[index]) : end]


class Text(ByteSamples):
    """A file, a folder or a JSONL file, cut into samples of at most `max_bytes` bytes.

    A plain file becomes consecutive pieces; empty files have none. A file that ends with .jsonl or .ndjson becomes one
    sample a line, cut at `max_bytes`; blank lines are left out. A folder is read with its subfolders in the order of
    the paths; names that start with a dot are left out.

    What is held out for validation is chosen by a hash, so it changes little when files come and go: files where there
    are several; of a single file, pieces or lines.

    Args:
        path: the file or folder.
        split: `train` leaves out what is held out, `validation` is that alone; None: all.
        holdout: the share that is held out, rounded to whole files (or pieces, or lines), at least one.
        max_bytes: longest sample.
        field: the key of a JSONL line that holds its text.
        pattern: which files of a folder, such as `*.txt`.

    Raises:
        DataError: nothing there, nothing that matches, nothing in it, or something that isn't text; names the file and
            the byte or line.
    """

    def __init__(
        self,
        path: str,
        split: str | None = None,
        holdout: float = 0.1,
        max_bytes: int = 512,
        field: str = "text",
        pattern: str = "*",
    ) -> None:
        check_arguments(split, holdout, max_bytes)
        root = Path(path).expanduser()
        files = _find(root, pattern)
        if len(files) > 1:
            names = [file.relative_to(root).as_posix() for file in files]
            chosen = select(names, split, holdout)
            samples = [piece for index in chosen for piece in _read(files[index], field, max_bytes)]
        else:
            pieces = list(_read(files[0], field, max_bytes))
            names = [f"{index}" for index in range(len(pieces))]
            samples = [pieces[index] for index in select(names, split, holdout)]
        if not samples:
            part = f"the {split} part of {path}" if split else f"{path}"
            raise DataError(f"{part} holds no text ({len(files)} file(s) read)")
        super().__init__(samples)


def check_arguments(split: str | None, holdout: float, max_bytes: int) -> None:
    """Raises DataError for arguments of a text set that can't work."""
    check_split(split, holdout)
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        raise DataError(f"max_bytes={max_bytes}: must be a whole number of at least 1")


def check_split(split: str | None, holdout: float) -> None:
    """Raises DataError for a split that there isn't, or a share that can't be held out."""
    if split is not None and split not in SPLITS:
        allowed = f"split={split!r}: must be train, validation or null"
        raise DataError(f"{allowed}\n  {nearest(str(split), SPLITS)}".rstrip())
    if not 0.0 <= holdout < 1.0:
        raise DataError(f"holdout={holdout}: must be a share from 0 to below 1")
    if split == "validation" and holdout == 0.0:
        raise DataError("holdout=0 leaves nothing for split='validation'")


def select(names: Sequence[str], split: str | None, holdout: float) -> list[int]:
    """The indices of the `names` that belong to a split, in their order.

    The share `holdout` of names with the smallest hashes is held out: at least one, and never the only one.
    """
    if split is None:
        return list(range(len(names)))
    num_held_out = min(max(round(len(names) * holdout), int(holdout > 0.0)), max(len(names) - 1, 0))
    by_hash = sorted(range(len(names)), key=lambda index: hashlib.sha256(names[index].encode()).digest())
    held_out = set(by_hash[:num_held_out])
    return [index for index in range(len(names)) if (index in held_out) == (split == "validation")]


def _find(root: Path, pattern: str) -> list[Path]:
    if root.is_file():
        return [root]
    if not root.exists():
        raise DataError(f"{root} isn't there")
    if not root.is_dir():
        raise DataError(f"{root} is neither a file nor a folder")
    try:
        found = sorted(file for file in root.rglob(pattern) if file.is_file())
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"pattern={pattern!r}: must be a relative pattern such as *.txt ({error})") from error
    files = [file for file in found if not any(part.startswith(".") for part in file.relative_to(root).parts)]
    if not files:
        raise DataError(f"no file in {root} matches pattern={pattern!r}")
    return files


def _read(file: Path, field: str, max_bytes: int) -> Iterator[bytes]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror}") from error
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = "pattern= chooses which files of a folder are read"
        raise DataError(f"{file} isn't UTF-8 text: byte {error.start} can't be read\n  {hint}") from error
    if file.suffix.lower() in JSONL_SUFFIXES:
        yield from _lines(file, content, field, max_bytes)
    else:
        yield from (content[start : start + max_bytes] for start in range(0, len(content), max_bytes))


def _lines(file: Path, content: bytes, field: str, max_bytes: int) -> Iterator[bytes]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} isn't JSON: {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{where} must be an object with the key {field!r}, not {type(record).__name__}")
        text = record.get(field)
        if not isinstance(text, str):
            keys = ", ".join(record) or "none"
            raise DataError(f"{where} has no text under the key {field!r}; its keys: {keys}")
        if not text:
            raise DataError(f"{where} has a text of length 0 under the key {field!r}")
        try:
            yield text.encode("utf-8")[:max_bytes]
        except UnicodeEncodeError as error:  # JSON may escape half of a surrogate pair
            raise DataError(f"{where} holds a character that UTF-8 can't write: {error.reason}") from error
