"""torch's distributed checkpoint, told of pieces: any rank may hold any part of any tensor, when saving and loading."""

import io
import pickle
from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from launcher.errors import LauncherError
from launcher.train.checkpoint.pieces import Box, Piece


def write(pieces: Sequence[Piece], folder: Path, group: dist.ProcessGroup | None, *, alone: bool) -> None:
    """Writes these pieces of all ranks of `group` into `folder`, flushed. Collective.

    Args:
        pieces: what this rank writes; each element of a tensor on one rank alone.
        alone: there is no other rank.

    Raises:
        CheckpointException: on every rank, where one couldn't write.
        OSError: this one couldn't, and is alone.
    """
    writer, plans = _Writer(folder, single_file_per_rank=True, sync_files=True), _SavePieces(pieces)
    if not alone:
        save({}, storage_writer=writer, planner=plans, process_group=group)
        return
    writer.set_up_storage_writer(True)
    plans.set_up_planner({}, None, True)
    (plan,), metadata = plans.create_global_plan([writer.prepare_local_plan(plans.create_local_plan())])
    (plan,) = writer.prepare_global_plan([plan])
    writer.finish(metadata, [writer.write_data(plans.finish_plan(plan), plans).wait()])


class Contents:
    """What `folder` holds. No other rank is asked.

    Raises:
        LauncherError: torch's list of what is where can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = _Reader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        self.tensors = {
            name: (one.size, one.properties.dtype)
            for name, one in self._metadata.state_dict_metadata.items()
            if isinstance(one, TensorStorageMetadata)
        }
        """The shape and type of every tensor, by name."""

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Reads what belongs into these pieces.

        Raises:
            LauncherError: a tensor isn't there, or has another shape.
        """
        plans = _LoadPieces(pieces)
        plans.set_up_planner({}, self._metadata, True)
        plan = plans.finish_plan(self._reader.prepare_local_plan(plans.create_local_plan()))
        self._reader.read_data(plan, plans).wait()


class _SavePieces(DefaultSavePlanner):
    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = pieces
        self._boxes: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        items = []
        for piece in self._pieces:
            properties = TensorProperties.create_from_tensor(piece.value)
            for box in piece.boxes():
                offsets = torch.Size(box.offsets)
                chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(box.sizes))
                data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(piece.shape))
                items.append(WriteItem(MetadataIndex(piece.name, offsets), WriteItemType.SHARD, tensor_data=data))
                self._boxes[piece.name, box.offsets] = box.value
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        offset = write_item.index.offset
        assert offset is not None
        return self._boxes[write_item.index.fqn, tuple(offset)]


class _LoadPieces(DefaultLoadPlanner):
    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._wanted: dict[str, list[Box]] = defaultdict(list)
        self._shapes = {piece.name: piece.shape for piece in pieces}
        for piece in pieces:
            self._wanted[piece.name] += piece.boxes()

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, boxes in self._wanted.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if not isinstance(saved, TensorStorageMetadata):
                raise LauncherError(f"the checkpoint has no '{name}'")
            if tuple(saved.size) != self._shapes[name]:
                raise LauncherError(
                    f"'{name}' has the shape {list(saved.size)} there and {list(self._shapes[name])} here"
                )
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
            items += create_read_items_for_chunk_list(name, saved, chunks)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index.index
        assert index is not None
        value = self._wanted[read_item.dest_index.fqn][index].value
        for axis, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            value = value.narrow(axis, offset, length)
        return value


class _Writer(FileSystemWriter):
    """Says what the system has refused, which torch's serializer hides behind its own complaint."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


class _Reader(FileSystemReader):
    """Reads torch's list of what is where without executing what a file says: only what such a list is made of."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        path = Path(str(self.path), ".metadata")
        with open(path, "rb") as file:
            try:
                metadata = _Names(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError) as error:
                raise LauncherError(f"{path}: can't be read: {error}") from error
        if not isinstance(metadata, Metadata):
            raise LauncherError(f"{path}: not the metadata of a checkpoint")
        return metadata


def _member(kind: Any, name: str) -> Enum:
    """The member of a choice, which Python 3.11.0 to 3.11.3 writes as ``getattr(choice, name)``."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"it asks {kind!r} for {name}, and only choices are asked")
    return kind[name]


class _Names(pickle.Unpickler):
    """Finds the classes that such a list is made of, and nothing else."""

    _FOUND_IN = "torch.distributed.checkpoint.metadata"
    _OTHERS = frozenset(
        {
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            ("torch", "device"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in self._OTHERS:
            return super().find_class(module, name)
        if module == self._FOUND_IN and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no business there")
