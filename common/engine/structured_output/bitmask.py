"""Fill the masks of one step while its forward runs.

Owns: the fill thread's work: one buffer per step, rows grouped by backend, stop bits last.
Does not know: logits, requests, the step.
"""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import structlog
import torch

from common.engine.structured_output.backend import Backend, BackendMatcher, FillRow
from common.engine.structured_output.backends import BackendSet
from common.engine.structured_output.grammar import MaskRow
from common.engine.structured_output.request_matcher import RequestMatcher
from common.engine.structured_output.thinking import ThinkingMatcher
from common.engine.structured_output.vocabulary import Int32Array, UInt32Array, Vocabulary

log = structlog.get_logger(__name__)


class ReadyBitmask:
    """Masks that needed no work."""

    def __init__(self, bitmask: torch.Tensor) -> None:
        self._bitmask = bitmask

    def wait(self) -> torch.Tensor:
        """The masks."""
        return self._bitmask


class FutureBitmask:
    """Masks the fill thread is working on."""

    def __init__(self, future: "Future[torch.Tensor]") -> None:
        self._future = future

    def wait(self) -> torch.Tensor:
        """The masks, int32 CPU `[num_rows, num_words]`; raises what the fill raised."""
        return self._future.result()


class BitmaskFiller:
    """One thread that fills masks; the libraries release the GIL and use threads of their own for many rows.

    Args:
        vocabulary: width of a row and the canonical end token.
        backends: who fills which rows.
        pin_memory: page-locked buffers, for an asynchronous copy to a GPU.
    """

    def __init__(self, vocabulary: Vocabulary, backends: BackendSet, *, pin_memory: bool) -> None:
        self._num_words = vocabulary.num_words
        self._backends = backends
        self._pin_memory = pin_memory
        self._end_word = vocabulary.end_token_id // 32
        self._end_bit = np.uint32(1 << (vocabulary.end_token_id % 32))
        self._valid_words = vocabulary.word_mask(range(vocabulary.size))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-fill")

    def fill(self, rows: Sequence[MaskRow]) -> FutureBitmask | ReadyBitmask:
        """Begin; returns at once. The matchers must not move before `wait` returned."""
        bitmask = torch.empty((len(rows), self._num_words), dtype=torch.int32, pin_memory=self._pin_memory)
        if not rows:
            return ReadyBitmask(bitmask)
        matchers = [_request_matcher(row) for row in rows]
        return FutureBitmask(self._thread.submit(self._fill, matchers, bitmask))

    def close(self) -> None:
        """End the thread; masks being filled are finished first."""
        self._thread.shutdown(wait=True)

    def _fill(self, matchers: Sequence[RequestMatcher], bitmask: torch.Tensor) -> torch.Tensor:
        by_backend: defaultdict[str, list[FillRow]] = defaultdict(list)
        for index, matcher in enumerate(matchers):
            inner = matcher.inner
            if not isinstance(inner, ThinkingMatcher):
                by_backend[matcher.backend].append(FillRow(inner, index))
            elif inner.may_be_inner:
                by_backend[matcher.backend].append(FillRow(inner.inner, index))
        words = bitmask.numpy()
        for name, rows in by_backend.items():
            _fill_apart(self._backends.get(name), rows, words)
        for matcher, row in zip(matchers, words.view(np.uint32), strict=True):
            _let_think(matcher.inner, row)
            self._spread_stops(matcher, row)
        return bitmask

    def _spread_stops(self, matcher: RequestMatcher, row: UInt32Array) -> None:
        """Give every stop id of the request the canonical end token's bit and clear padding bits, in place."""
        if matcher.is_terminated():
            row[:] = matcher.stop_words
            return
        can_end = bool(row[self._end_word] & self._end_bit)
        row[self._end_word] &= ~self._end_bit
        row &= self._valid_words & ~matcher.stop_words
        if can_end:
            row |= matcher.stop_words


def _let_think(matcher: BackendMatcher, row: UInt32Array) -> None:
    """Allow thinking where it may still begin, and nothing else inside it, in place."""
    if isinstance(matcher, ThinkingMatcher) and not matcher.is_after:
        row[:] = row | matcher.own_row() if matcher.may_be_inner else matcher.own_row()


def _fill_apart(backend: Backend, rows: Sequence[FillRow], words: Int32Array) -> None:
    """Fill together; a library that fails fails only the rows it fails on, which allow nothing then."""
    try:
        backend.fill(rows, words)
    except BaseException as error:  # noqa: BLE001 a native library's panic is no `Exception`; others' rows go on
        if len(rows) > 1:
            for row in rows:
                _fill_apart(backend, [row], words)
            return
        words[rows[0].row] = 0
        log.error("grammar.mask_failed", backend=backend.name, error=repr(error))


def _request_matcher(row: MaskRow) -> RequestMatcher:
    if not isinstance(row.matcher, RequestMatcher):
        raise TypeError(f"row {row.row}: not a matcher of this service: {type(row.matcher).__name__}")
    return row.matcher
