"""The port of a logits processor, and the adapter that makes one out of a function per request.

Owns: the protocol custom processors implement (named in the config or by entry point). Idea and method names: vLLM 0.32
`v1/sample/logits_processor/interface.py`; `rows` is ours, so that one request may have several logits rows.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from common.engine.sampling.batch_state import AddedRow, BatchUpdate, LogitsRows, RowTable
from common.engine.sampling.params import SamplingParams

RowCallable = Callable[[Sequence[int], torch.Tensor], torch.Tensor]
"""(output token ids so far, logits float32 [vocab_size]) -> logits; may change its argument in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorContext:
    """What a processor is built from."""

    vocab_size: int
    max_rows: int
    device: torch.device


@runtime_checkable
class LogitsProcessor(Protocol):
    """Changes logits of the rows it cares for. Custom classes subclass this and take one `ProcessorContext`."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Refuse a request at the door: raise `InvalidRequest` naming the field. The default accepts everything."""
        del params

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether it can never change which token has the highest logit; then greedy rows skip it."""

    @abstractmethod
    def update_state(self, update: BatchUpdate) -> None:
        """Follow the batch: removed, then added, then moved. `output_token_ids` of added rows grow by themselves."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Return the new logits float32 [R, vocab_size]; changing them in place is fine."""


class PerRequestProcessor(LogitsProcessor):
    """Adapter: subclass it and say which function, if any, a request wants; slower than a batched processor.

    Args:
        context: vocabulary size, rows and device.
    """

    def __init__(self, context: ProcessorContext) -> None:
        self.context = context
        self._table: RowTable[tuple[RowCallable, Sequence[int]]] = RowTable(self._make)

    @abstractmethod
    def new_request(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> RowCallable | None:
        """The function of one request, or None when it has no use for this processor."""

    def is_argmax_invariant(self) -> bool:
        """A function may do anything; override when it cannot change the argmax."""
        return False

    def update_state(self, update: BatchUpdate) -> None:
        """Follow the batch."""
        self._table.update(update)

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Call each request's function on its rows, with the drafts before them counted as output."""
        for position, (function, outputs) in self._table.select(rows):
            drafts = rows.drafts[position] if rows.drafts else ()
            row = logits[position]
            result = function([*outputs, *drafts] if drafts else outputs, row)
            if result is not row:
                row.copy_(result)
        return logits

    def _make(self, added: AddedRow) -> tuple[RowCallable, Sequence[int]] | None:
        function = self.new_request(added.params, added.prompt_token_ids)
        return None if function is None else (function, added.output_token_ids)
