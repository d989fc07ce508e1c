"""Custom logits processors as a user would write them, good and bad."""

from typing import ClassVar

import torch

from common.engine.sampling.batch_state import AddedRow, BatchUpdate, LogitsRows, RowTable
from common.engine.sampling.processors.processor import LogitsProcessor, ProcessorContext


def _preferred(added: AddedRow) -> int | None:
    wanted = added.params.extra_args.get("prefer")
    return wanted if isinstance(wanted, int) else None


class PreferToken(LogitsProcessor):
    """Adds 50 to the token named by `vllm_xargs: {"prefer": id}`."""

    def __init__(self, context: ProcessorContext) -> None:
        self._table: RowTable[int] = RowTable(_preferred)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, update: BatchUpdate) -> None:
        self._table.update(update)

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        for row, token in self._table.select(rows):
            logits[row, token] += 50
        return logits


class DropBelow(LogitsProcessor):
    """Keeps only the highest logit, which cannot change the argmax."""

    calls: ClassVar[int] = 0

    def __init__(self, context: ProcessorContext) -> None:
        self.context = context

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, update: BatchUpdate) -> None:
        pass

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        DropBelow.calls += 1
        return logits.masked_fill(logits < logits.amax(dim=1, keepdim=True), -torch.inf)


class FailsToBuild(PreferToken):
    """Needs something that is not there."""

    def __init__(self, context: ProcessorContext) -> None:
        raise FileNotFoundError("no such file: weights.bin")


class NotAProcessor:
    """Has none of it."""


def not_a_class() -> None:
    """A function."""
