"""A run's model as a folder that `from_pretrained` reads. Nothing is loaded: weights are copied as bytes."""

import json
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from launcher.run_dir import RunDir

CHUNK = 1 << 24


def write_folder(run: RunDir, target: Path) -> None:
    """Writes `target`, whole or not at all: the run's weights, and beside them what the run has kept for it.

    Tensors that the file says to be another one's are left out, as `save_pretrained` does.

    Raises:
        OSError: it can't be written, or is there and not empty.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        shutil.copytree(run.pretrained, temporary)
        with run.model.open("rb") as source, (temporary / run.model.name).open("wb") as copy:
            copy_untied(source, copy)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_untied(source: BinaryIO, copy: BinaryIO) -> None:
    """Copies a safetensors file without the tensors that its metadata calls another one's.

    The format, of the documentation of safetensors: the header's length in 8 bytes, the header as JSON, and the bytes
    of the tensors one after another, of which the header has the first and the last one's place.
    """
    length = int.from_bytes(source.read(8), "little")
    header = json.loads(source.read(length))
    start = 8 + length
    metadata = header.pop("__metadata__", {})
    tied = {name for name, other in metadata.items() if name in header and other in header}
    kept = sorted((one for one in header.items() if one[0] not in tied), key=lambda one: one[1]["data_offsets"])
    places, end = {}, 0
    for name, one in kept:
        first, last = one["data_offsets"]
        places[name] = {**one, "data_offsets": [end, end + last - first]}
        end += last - first
    others = {name: other for name, other in metadata.items() if name not in tied}
    text = json.dumps({"__metadata__": others, **places}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    copy.write(len(text).to_bytes(8, "little") + text)
    for _, one in kept:
        first, last = one["data_offsets"]
        source.seek(start + first)
        left = last - first
        while left:
            read = source.read(min(left, CHUNK))
            if not read:
                raise OSError(None, "the run's model.safetensors ends too early")
            left -= copy.write(read)
