"""Fill the masks of one step while its forward runs.

Owns: the fill thread's work: one buffer per step, rows grouped by backend, stop bits last.
Does not know: logits, requests, the step.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

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


class FilledBitmask:
    """Masks that the fill thread is working on, or that needed no work."""

    def __init__(self, bitmask: torch.Tensor) -> None:
        self._bitmask = bitmask
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._has_ended = False

    def end(self, error: BaseException | None = None) -> None:
        """They are filled, or never will be. Any thread, once."""
        self._ended.put(error)

    def wait(self) -> torch.Tensor:
        """The masks, int32 CPU `[num_rows, num_words]`; raises what the fill raised. One thread."""
        if not self._has_ended:
            error = self._ended.get()
            if error is not None:
                self._ended.put(error)
                raise error
            self._has_ended = True
        return self._bitmask


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request's rows: its own and one behind each token of its draft."""

    matcher: RequestMatcher
    first_row: int
    draft: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Rows:
    """What is asked of one step, and the memory its masks go to.

    Attributes:
        given: what the caller said, when that is a tuple: the same tuple asks for the same again.
        asked: who, in order.
        bitmask: int32 CPU `[num_rows, num_words]`.
    """

    given: tuple[MaskRow, ...] | None
    asked: tuple[_Asked, ...]
    bitmask: torch.Tensor


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
        self._last: _Rows | None = None
        # A bare thread and two queues hand a step's masks over in a fifth of what an executor takes.
        self._tasks: SimpleQueue[tuple[FilledBitmask, _Rows] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="grammar-fill", daemon=True)
        self._thread.start()

    def fill(self, rows: Sequence[MaskRow]) -> FilledBitmask:
        """Begin; returns at once. The matchers must not move before `wait` returned.

        Behind each row come those of its draft, in order. A tuple of rows that is given again is known by itself and
        gets the memory it had: its masks are read before that.
        """
        last = self._last
        if last is None or rows is not last.given or self._pin_memory:
            last = self._last = self._rows(rows)
        pending = FilledBitmask(last.bitmask)
        if last.asked:
            self._tasks.put((pending, last))
        else:
            pending.end()
        return pending

    def _rows(self, rows: Sequence[MaskRow]) -> _Rows:
        asked, num_rows = [], 0
        for row in rows:
            asked.append(_Asked(_request_matcher(row), num_rows, row.draft))
            num_rows += row.num_rows
        bitmask = torch.empty((num_rows, self._num_words), dtype=torch.int32, pin_memory=self._pin_memory)
        return _Rows(rows if isinstance(rows, tuple) else None, tuple(asked), bitmask)

    def close(self) -> None:
        """End the thread; masks being filled are finished first. Idempotent."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            pending, rows = task
            try:
                self._fill(rows.asked, rows.bitmask.numpy())
            except BaseException as error:  # noqa: BLE001 it is raised where the masks are waited for
                pending.end(error)
            else:
                pending.end()
            del task, pending, rows  # the next step may be long in coming

    def _fill(self, asked: Sequence[_Asked], words: Int32Array) -> None:
        """All first rows together, then those behind the first drafted tokens, and so on; no matcher has moved then."""
        self._fill_rows([(entry.matcher, entry.first_row) for entry in asked], words)
        drafting = [entry for entry in asked if entry.draft]
        if drafting:
            self._fill_behind_drafts(drafting, words)

    def _fill_behind_drafts(self, drafting: Sequence[_Asked], words: Int32Array) -> None:
        num_moved = [0] * len(drafting)
        for entry in drafting:
            words[entry.first_row + 1 : entry.first_row + 1 + len(entry.draft)] = 0
        for depth in range(max(len(entry.draft) for entry in drafting)):
            rows = []
            for index, entry in enumerate(drafting):
                if num_moved[index] == depth < len(entry.draft) and _moves_on(entry.matcher, entry.draft[depth]):
                    num_moved[index] += 1
                    rows.append((entry.matcher, entry.first_row + num_moved[index]))
            self._fill_rows(rows, words)
        for entry, num_tokens in zip(drafting, num_moved, strict=True):
            _move_back(entry, num_tokens, words)

    def _fill_rows(self, asked: Sequence[tuple[RequestMatcher, int]], words: Int32Array) -> None:
        by_backend: defaultdict[str, list[FillRow]] = defaultdict(list)
        for matcher, index in asked:
            inner = matcher.inner
            if not isinstance(inner, ThinkingMatcher):
                by_backend[matcher.backend].append(FillRow(inner, index))
            elif inner.may_be_inner:
                by_backend[matcher.backend].append(FillRow(inner.inner, index))
        for name, rows in by_backend.items():
            _fill_apart(self._backends.get(name), rows, words)
        unsigned = words.view(np.uint32)
        for matcher, index in asked:
            _let_think(matcher.inner, unsigned[index])
            self._spread_stops(matcher, unsigned[index])

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


def _moves_on(matcher: RequestMatcher, token_id: int) -> bool:
    try:
        return matcher.accept((token_id,))
    except BaseException as error:  # noqa: BLE001 a native library's panic is no `Exception`; others' rows go on
        log.error("grammar.draft_failed", backend=matcher.backend, error=repr(error))
        return False


def _move_back(entry: _Asked, num_tokens: int, words: Int32Array) -> None:
    """Where the library fails even at that, nobody knows where the matcher stands: nothing is allowed any more."""
    try:
        entry.matcher.rollback(num_tokens)
    except BaseException as error:  # noqa: BLE001 as above; the request ends, no other
        words[entry.first_row : entry.first_row + 1 + len(entry.draft)] = 0
        log.error("grammar.draft_failed", backend=entry.matcher.backend, error=repr(error))


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
