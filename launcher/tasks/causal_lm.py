"""Next-token prediction on sequences of different lengths."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from launcher.errors import ConfigError, DataError
from launcher.tasks.base import Batch

Ids = NDArray[np.integer[Any]]


class CausalLM:
    """Predicts each token of a sample from those before it.

    A sample is a sequence of token ids (bytes, a list, a 1-D integer array or tensor), or a dict of two such sequences,
    `input_ids` and `labels`, of which `labels[i]` is `input_ids[i]` or, where it shall not be trained on,
    `ignore_index`; the shift by one position is made here.

    Args:
        vocab_size: token ids are in [0, vocab_size).
        bos: id put before every sample, so that its first token is predicted too; None: the first token is only read.
        ignore_index: the label of positions that don't count.
        pad: id that fills up shorter rows; those positions never count.
    """

    loss_unit = "nats per token"
    """What a loss is in, for the axis of a picture."""

    def __init__(self, vocab_size: int = 257, bos: int | None = 256, ignore_index: int = -100, pad: int = 0) -> None:
        if vocab_size < 1:
            raise ConfigError("task.vocab_size", vocab_size, "must be at least 1")
        for key, value in (("bos", bos), ("pad", pad)):
            if value is not None and not 0 <= value < vocab_size:
                raise ConfigError(f"task.{key}", value, f"must be a token id from 0 to {vocab_size - 1}")
        if 0 <= ignore_index < vocab_size:
            raise ConfigError("task.ignore_index", ignore_index, "must lie outside the vocabulary, as -100 does")
        self.vocab_size, self.bos, self.ignore_index, self.pad = vocab_size, bos, ignore_index, pad

    def collate(self, samples: list[Any]) -> Batch:
        """`input_ids` and `labels`, both int64 [rows, T]; shorter rows are filled up at the right.

        Raises:
            DataError: a sample without a token to predict, no sequence of ids, or an id outside the vocabulary.
        """
        pairs = [self._read(sample, index) for index, sample in enumerate(samples)]
        self._check_ids([ids for ids, _ in pairs], "token id", labels=False)
        self._check_ids([labels for ids, labels in pairs if labels is not ids], "label", labels=True)
        skipped = 0 if self.bos is not None else 1
        longest = max((len(ids) for ids, _ in pairs), default=skipped) - skipped
        input_ids = np.full((len(pairs), longest), self.pad, dtype=np.int64)
        targets = np.full((len(pairs), longest), self.ignore_index, dtype=np.int64)
        for row, (ids, labels) in enumerate(pairs):
            size = len(ids) - skipped
            targets[row, :size] = labels[skipped:]
            if self.bos is None:
                input_ids[row, :size] = ids[:-1]
            else:
                input_ids[row, 0] = self.bos
                input_ids[row, 1:size] = ids[:-1]
        return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(targets)}

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """`input_ids`, int64 [rows, T]."""
        return {"input_ids": batch["input_ids"]}

    def weight(self, batch: Batch) -> Tensor:
        """Trainable tokens of each row, int64 [rows]."""
        return (batch["labels"] != self.ignore_index).sum(dim=1)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Sum of the cross entropies of each row in nats, [rows]; in float32, or float64 where the logits are.

        `output` is the logits [rows, T, vocab_size], or an object that holds them as `logits`.
        """
        logits: Tensor = getattr(output, "logits", output)
        if logits.dtype != torch.float64:
            logits = logits.float()
        logits, labels = logits.flatten(0, 1), batch["labels"].flatten()
        if logits.requires_grad:
            # An ignored position has no loss, but the softmax's backward turns inf times 0 into NaN there.
            ignored = (labels == self.ignore_index).unsqueeze(1)
            logits.register_hook(lambda gradient: gradient.masked_fill(ignored, 0.0))  # type: ignore[no-untyped-call]
        losses = F.cross_entropy(logits, labels, ignore_index=self.ignore_index, reduction="none")
        return losses.view_as(batch["labels"]).sum(dim=1)

    def length(self, sample: Any) -> int:
        """Input tokens of a sample."""
        ids = sample["input_ids"] if isinstance(sample, dict) else sample
        return len(ids) if self.bos is not None else max(len(ids) - 1, 0)

    def target_counts(self, batch: Batch) -> Tensor:
        """How often each token is a target in the batch, int64 [vocab_size]."""
        labels = batch["labels"]
        return torch.bincount(labels[labels != self.ignore_index], minlength=self.vocab_size)

    def _read(self, sample: Any, index: int) -> tuple[Ids, Ids]:
        where = f"sample {index} of the batch"
        if isinstance(sample, dict):
            if "input_ids" not in sample:
                raise DataError(f"{where} has no input_ids; its keys are {', '.join(map(str, sample)) or 'none'}")
            ids = _as_ids(sample["input_ids"], f"input_ids of {where}")
            labels = _as_ids(sample["labels"], f"labels of {where}") if "labels" in sample else ids
            if len(labels) != len(ids):
                raise DataError(f"{where} has {len(ids)} input_ids and {len(labels)} labels; they must be equally many")
        else:
            ids = labels = _as_ids(sample, where)
        if len(ids) == 0:
            raise DataError(f"{where} has length 0")
        if self.bos is None and len(ids) == 1:
            raise DataError(f"{where} has length 1: without task.bos nothing is left to predict")
        return ids, labels

    def _check_ids(self, sequences: Sequence[Ids], what: str, *, labels: bool) -> None:
        if not sequences:
            return
        values = np.concatenate(sequences)
        wrong = (values < 0) | (values >= self.vocab_size)
        if labels:
            wrong &= values != self.ignore_index
        if not wrong.any():
            return
        position = int(wrong.argmax())
        allowed = f"0 to {self.vocab_size - 1}" + (f", and {self.ignore_index} for what is not trained on" * labels)
        ends = np.cumsum([len(sequence) for sequence in sequences])
        row = int(np.searchsorted(ends, position, side="right"))
        offset = position - int(ends[row]) + len(sequences[row])
        raise DataError(
            f"{what} {values[position]} at position {offset} of a sample is outside the vocabulary: {allowed}"
        )


def _as_ids(values: Any, where: str) -> Ids:
    if isinstance(values, bytes | bytearray | memoryview):
        return np.frombuffer(values, dtype=np.uint8)
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(f"{where} is no sequence of token ids: {error}") from error
    if array.ndim == 1 and array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{where} must be a 1-D sequence of integers, not {array.ndim}-D of {array.dtype}")
    return array
