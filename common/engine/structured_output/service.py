"""The grammar service of one engine process: compile off the step loop, cache, start matchers, fill masks.

Journey rows 3b and 6 to 8. Owns: the compile threads, single flight, the cache, which backend is tried in which order.
Does not know: requests, roles, HTTP.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from common.clock import Clock
from common.config.engine import GrammarConfig
from common.engine.structured_output.backend import Backend
from common.engine.structured_output.bitmask import BitmaskFiller
from common.engine.structured_output.cache import CacheEntry, CacheKey, GrammarCache
from common.engine.structured_output.door import check_at_door
from common.engine.structured_output.grammar import CompileState, GrammarTicket, MaskRow, PendingBitmask
from common.engine.structured_output.guidance_backend import GuidanceBackend
from common.engine.structured_output.planner import plan
from common.engine.structured_output.request_matcher import RequestMatcher
from common.engine.structured_output.ticket import Ticket
from common.engine.structured_output.vocabulary import Vocabulary, read_vocabulary
from common.engine.structured_output.xgrammar_backend import XGrammarBackend
from common.engine.tokenizer import Tokenizer
from common.errors import Bug, ConstraintRejected
from common.wire.constraint import Constraint

_COMPILE_THREADS = 2


class GrammarObserver(Protocol):
    """Who counts compilations; called from compile threads."""

    def compiled(self, backend: str, outcome: str, seconds: float) -> None:
        """One compilation ended: outcome `ready`, `rejected` or `limit`."""
        ...

    def looked_up(self, result: str) -> None:
        """One cache look-up: `hit`, `negative_hit`, `joined` (still compiling) or `miss`."""
        ...


class NoObserver:
    """Counts nothing."""

    def compiled(self, backend: str, outcome: str, seconds: float) -> None:
        """Ignore."""

    def looked_up(self, result: str) -> None:
        """Ignore."""


class LocalGrammarService:
    """Implements `GrammarService` inside the engine process.

    Args:
        tokenizer: whose vocabulary masks cover.
        config: backends, limits, cache.
        clock: for compile times and expiry.
        logits_width: width of the model's logits when wider than the vocabulary (padding).
        pin_memory: page-locked mask buffers, for `device: cuda`.
        observer: counts compilations and cache look-ups.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: GrammarConfig,
        clock: Clock,
        *,
        logits_width: int | None = None,
        pin_memory: bool = False,
        observer: GrammarObserver | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._observer = observer or NoObserver()
        self._vocabulary = read_vocabulary(tokenizer, logits_width)
        self._eos_token_ids = tokenizer.eos_token_ids
        self._backends = _make_backends(self._vocabulary)
        self._filler = BitmaskFiller(self._vocabulary, self._backends, pin_memory=pin_memory)
        self._cache = GrammarCache(config.cache_bytes, config.prepared_ttl_s)
        self._compiling: dict[CacheKey, Ticket] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers=_COMPILE_THREADS, thread_name_prefix="grammar-compile")

    def check(self, constraint: Constraint) -> None:
        """Cheap refusal at the door. Raises `ConstraintRejected`."""
        check_at_door(constraint)

    def compile(self, constraint: Constraint) -> GrammarTicket:
        """Ask for the grammar; returns at once."""
        now_s = self._clock.now_s()
        with self._lock:
            self._cache.expire_unused(now_s)
            joined = self._compiling.get(constraint.key)
            if joined is not None:
                self._observer.looked_up("joined")
                return joined
            ticket = Ticket(constraint, now_s)
            entry = self._cache.get(constraint.key)
            if entry is None:
                self._compiling[constraint.key] = ticket
        if entry is None:
            self._observer.looked_up("miss")
            self._threads.submit(self._run, ticket)
        else:
            self._settle_from(entry, ticket)
        return ticket

    def start_matcher(self, ticket: GrammarTicket, stop_token_ids: frozenset[int]) -> RequestMatcher:
        """A fresh matcher of a READY ticket.

        Args:
            ticket: from `compile` of this service.
            stop_token_ids: ids that may end the output; the tokenizer's EOS ids are always among them.
        """
        if not isinstance(ticket, Ticket) or ticket.backend is None:
            raise Bug(f"a matcher of a ticket that is {ticket.state.value}")
        with self._lock:
            entry = self._cache.get(ticket.constraint.key)
            if entry is not None:
                entry.num_uses += 1
        stops = stop_token_ids | self._eos_token_ids
        return RequestMatcher(ticket.grammar.start(), ticket.backend, stops, self._vocabulary.word_mask(stops))

    def fill(self, rows: Sequence[MaskRow]) -> PendingBitmask:
        """Begin filling; returns at once."""
        return self._filler.fill(rows)

    def close(self) -> None:
        """Stop compiling and end the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._filler.close()

    def _settle_from(self, entry: CacheEntry, ticket: Ticket) -> None:
        if entry.grammar is not None:
            self._observer.looked_up("hit")
            ticket.succeed(entry.grammar, entry.backend, ticket.asked_s, entry.unenforced)
        else:
            self._observer.looked_up("negative_hit")
            error = entry.error or ConstraintRejected("refused before", ticket.constraint.field)
            ticket.fail(ConstraintRejected(error.message, ticket.constraint.field), ticket.asked_s)

    def _run(self, ticket: Ticket) -> None:
        """Compile `ticket`'s constraint on a compile thread and settle it; never raises."""
        try:
            entry = self._compile_entry(ticket.constraint)
        except ConstraintRejected as error:
            entry = CacheEntry(error=error)
        except Exception as error:  # noqa: BLE001 a library's surprise fails this constraint, never the engine
            entry = CacheEntry(error=ConstraintRejected(f"cannot be compiled: {error}", ticket.constraint.field))
        now_s = self._clock.now_s()
        entry.settled_s = now_s
        with self._lock:
            self._cache.put(ticket.constraint.key, entry)
            del self._compiling[ticket.constraint.key]
        if entry.grammar is not None:
            ticket.succeed(entry.grammar, entry.backend, now_s, entry.unenforced)
        else:
            ticket.fail(entry.error or ConstraintRejected("refused", ticket.constraint.field), now_s)

    def _compile_entry(self, constraint: Constraint) -> CacheEntry:
        check_at_door(constraint)
        first_error: ConstraintRejected | None = None
        for attempt in plan(constraint, self._config):
            started_s = self._clock.now_s()
            try:
                grammar = self._backends[attempt.backend].compile(attempt.constraint)
            except ConstraintRejected as error:
                self._observer.compiled(attempt.backend, "rejected", self._clock.now_s() - started_s)
                first_error = first_error or error
            else:
                self._observer.compiled(attempt.backend, "ready", self._clock.now_s() - started_s)
                return CacheEntry(grammar=grammar, backend=attempt.backend, unenforced=attempt.unenforced)
        raise first_error or ConstraintRejected(
            f"no backend takes a {constraint.kind.value} constraint", constraint.field
        )


def _make_backends(vocabulary: Vocabulary) -> Mapping[str, Backend]:
    guidance: Backend = GuidanceBackend(vocabulary)
    fast: Backend = XGrammarBackend(vocabulary)
    return {guidance.name: guidance, fast.name: fast}


__all__ = ["CompileState", "GrammarObserver", "LocalGrammarService"]
