"""The grammar service of one engine process: compile off the step loop, cache, start matchers, fill masks.

Journey rows 3b and 6 to 8. Owns: the compile threads, single flight, the cache, which backend is tried in which order.
Does not know: requests, roles, HTTP.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

import msgspec

from common.clock import Clock, Deadline
from common.config.engine import GrammarConfig
from common.engine.structured_output.backend import BackendMatcher, CompiledGrammar, PortableBackend
from common.engine.structured_output.backends import BackendSet
from common.engine.structured_output.bitmask import BitmaskFiller
from common.engine.structured_output.cache import CacheEntry, CacheKey, GrammarCache
from common.engine.structured_output.door import check_at_door
from common.engine.structured_output.final_check import require_checker, why_invalid
from common.engine.structured_output.grammar import GrammarTicket, MaskRow, PendingBitmask
from common.engine.structured_output.limits import LimitPassed, probe_error
from common.engine.structured_output.planner import Attempt, plan
from common.engine.structured_output.probe import CompileProbe
from common.engine.structured_output.probe_wire import ProbeReport, ProbeVerdict
from common.engine.structured_output.request_matcher import RequestMatcher
from common.engine.structured_output.thinking import Thinking, ThinkingMarks, ThinkingMatcher
from common.engine.structured_output.ticket import Ticket
from common.engine.structured_output.vocabulary import read_vocabulary
from common.engine.tokenizer import Tokenizer
from common.errors import Bug, ConstraintRejected
from common.wire.constraint import Constraint

_COMPILE_THREADS = 2
_PROBES = 2
_FILL_THREADS = 2
_FIRST_LOOK_S = 1.0
"""What a probe gets at first: one that needs longer queues again, behind those that may be quick."""
_SLOWER_HERE = 1.5
"""How much longer a compile may take here, beside the step loop, than it took in the probe."""


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
        thinking_marks: start and end of the model's thinking; None for a model that does not think.
        warm: import the slow libraries in the background now, rather than when a constraint first needs them.
    """

    def __init__(  # noqa: PLR0913 five optional facts of the deployment, each by name
        self,
        tokenizer: Tokenizer,
        config: GrammarConfig,
        clock: Clock,
        *,
        logits_width: int | None = None,
        pin_memory: bool = False,
        observer: GrammarObserver | None = None,
        thinking_marks: tuple[str, str] | None = None,
        warm: bool = False,
    ) -> None:
        if config.on_inexact == "validate":
            require_checker()
        self._config = config
        self._clock = clock
        self._observer = observer or NoObserver()
        self._vocabulary = read_vocabulary(tokenizer, logits_width)
        self._marks = None
        if thinking_marks is not None and not config.enable_in_reasoning:
            self._marks = ThinkingMarks(*thinking_marks, self._vocabulary)
        self._eos_token_ids = tokenizer.eos_token_ids
        self._backends = BackendSet(self._vocabulary, _FILL_THREADS)
        self._filler = BitmaskFiller(self._vocabulary, self._backends, pin_memory=pin_memory)
        self._cache = GrammarCache(config.cache_bytes, config.prepared_ttl_s)
        self._compiling: dict[CacheKey, Ticket] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers=_COMPILE_THREADS, thread_name_prefix="grammar-compile")
        self._probe = CompileProbe(self._vocabulary, config.compile_memory_bytes)
        self._probe_threads = ThreadPoolExecutor(max_workers=_PROBES, thread_name_prefix="grammar-probe")
        if warm:
            self._probe_threads.submit(self._warm)
        self._backends.get("guidance" if config.backend == "auto" else config.backend)

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

    def why_invalid(self, ticket: GrammarTicket, text: str) -> str | None:
        """What is wrong with a finished text, None when nothing is.

        Needed only where the ticket's `unenforced` is not empty (`on_inexact: validate`); costs a full validation.
        """
        if not isinstance(ticket, Ticket) or not ticket.unenforced:
            return None
        return why_invalid(ticket.constraint.value, text)

    def start_matcher(
        self, ticket: GrammarTicket, stop_token_ids: frozenset[int], thinking: Thinking = Thinking.NONE
    ) -> RequestMatcher:
        """A fresh matcher of a READY ticket.

        Args:
            ticket: from `compile` of this service.
            stop_token_ids: ids that may end the output; the tokenizer's EOS ids are always among them.
            thinking: what may stand before the constrained text; ignored with `enable_in_reasoning`.
        """
        if not isinstance(ticket, Ticket) or ticket.backend is None:
            raise Bug(f"a matcher of a ticket that is {ticket.state.value}")
        with self._lock:
            entry = self._cache.get(ticket.constraint.key)
            if entry is not None:
                entry.num_uses += 1
        stops = stop_token_ids | self._eos_token_ids
        inner: BackendMatcher = ticket.grammar.start()
        if self._marks is not None and thinking is not Thinking.NONE:
            inner = ThinkingMatcher(inner, self._marks, is_open=thinking is Thinking.OPEN)
        return RequestMatcher(inner, ticket.backend, stops, self._vocabulary.word_mask(stops))

    def fill(self, rows: Sequence[MaskRow]) -> PendingBitmask:
        """Begin filling; returns at once."""
        return self._filler.fill(rows)

    def probe_server_pid(self) -> int | None:
        """Process id of the probe server; None before a constraint needed it."""
        return self._probe.server_pid()

    def close(self) -> None:
        """Stop compiling; end threads and probe processes. Tickets still compiling stay so."""
        self._probe.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._probe_threads.shutdown(wait=True, cancel_futures=True)
        self._filler.close()

    def _settle_from(self, entry: CacheEntry, ticket: Ticket) -> None:
        if entry.grammar is not None:
            self._observer.looked_up("hit")
            ticket.succeed(entry.grammar, entry.backend, ticket.asked_s, entry.unenforced)
        else:
            self._observer.looked_up("negative_hit")
            error = entry.error or ConstraintRejected("refused before", ticket.constraint.field)
            ticket.fail(ConstraintRejected(error.message, ticket.constraint.field), ticket.asked_s)

    def _warm(self) -> None:
        self._backends.get("xgrammar")
        self._probe.load("xgrammar")

    def _run(self, ticket: Ticket) -> None:
        """On a compile thread: plan and make the attempts of `ticket`; settles it or hands it to a probe thread."""
        with self._settling(ticket):
            check_at_door(ticket.constraint)
            self._attempt(ticket, plan(ticket.constraint, self._config), None)

    def _run_probed(
        self,
        ticket: Ticket,
        attempts: Sequence[Attempt],
        error: ConstraintRejected | None,
        *,
        is_first_look: bool = True,
    ) -> None:
        """On a probe thread: the same from the first attempt that needs a probe."""
        with self._settling(ticket):
            report = self._probed(ticket, attempts[0], is_first_look=is_first_look)
            if report is not None:
                self._attempt(ticket, attempts, error, report)
            else:
                self._probe_threads.submit(self._run_probed, ticket, attempts, error, is_first_look=False)

    def _attempt(
        self,
        ticket: Ticket,
        attempts: Sequence[Attempt],
        error: ConstraintRejected | None,
        report: ProbeReport | None = None,
    ) -> None:
        """Make `attempts` in order until one compiles.

        Args:
            ticket: whose they are.
            attempts: those that are left.
            error: the reason of the attempt before.
            report: what the probe of the first said; None before one looked at it.
        """
        for index, attempt in enumerate(attempts):
            first_report = report if index == 0 else None
            if attempt.needs_probe and first_report is None:
                self._probe_threads.submit(self._run_probed, ticket, attempts[index:], error)
                return
            started_s = self._clock.now_s()
            try:
                grammar = self._compiled(attempt, first_report)
            except ConstraintRejected as refused:
                self._observer.compiled(attempt.backend, "rejected", self._clock.now_s() - started_s)
                error = refused
            else:
                compile_s = self._clock.now_s() - started_s
                in_probe_s = first_report.compile_s if first_report is not None and first_report.packed else 0.0
                self._observer.compiled(attempt.backend, "ready", in_probe_s + compile_s)
                entry = CacheEntry(
                    grammar=grammar,
                    backend=attempt.backend,
                    unenforced=attempt.unenforced,
                    compile_s=compile_s,
                    grammar_bytes=None if first_report is None else first_report.num_bytes,
                )
                self._settle(ticket, entry)
                return
        raise error or ConstraintRejected("no backend takes it", ticket.constraint.field)

    def _compiled(self, attempt: Attempt, report: ProbeReport | None) -> CompiledGrammar:
        """The grammar as its probe hands it over; otherwise compiled here and now."""
        backend = self._backends.get(attempt.backend)
        if report is not None and report.packed is not None and isinstance(backend, PortableBackend):
            return backend.unpack(report.packed)
        return backend.compile(attempt.constraint)

    def _probed(self, ticket: Ticket, attempt: Attempt, *, is_first_look: bool) -> ProbeReport | None:
        """The report after which compiling here is safe; None: not known after a first look; otherwise raises why not.

        Where the probe cannot hand over what it compiles, it may take half of the time that is left: the other half is
        for doing it again in this process, where nothing ends it. So what is not handed over and may not be done again
        in what is left by then counts as too slow, too.
        """
        is_portable = isinstance(self._backends.get(attempt.backend), PortableBackend)
        left_s = ticket.asked_s + self._config.compile_timeout_s - self._clock.now_s()
        self._probe.load(attempt.backend)
        probe_s = max(left_s, 0.0) / (1 if is_portable else 2)
        look_s = min(probe_s, _FIRST_LOOK_S) if is_first_look else probe_s
        deadline = Deadline.after(self._clock, look_s)
        report = self._probe.try_compile(attempt.backend, attempt.constraint, deadline)
        if report.verdict is ProbeVerdict.TIMED_OUT and look_s < probe_s:
            return None
        if report.verdict is ProbeVerdict.COMPILED:
            left_s = ticket.asked_s + self._config.compile_timeout_s - self._clock.now_s()
            if report.packed is not None or report.compile_s * _SLOWER_HERE <= left_s:
                return report
            report = msgspec.structs.replace(report, verdict=ProbeVerdict.TIMED_OUT)
        outcome = "rejected" if report.verdict is ProbeVerdict.REJECTED else "limit"
        self._observer.compiled(attempt.backend, outcome, report.compile_s)
        raise probe_error(report, attempt.constraint, self._config)

    @contextmanager
    def _settling(self, ticket: Ticket) -> Iterator[None]:
        """Whatever goes wrong inside fails the ticket, and only it."""
        try:
            yield
        except LimitPassed as error:
            self._settle(ticket, CacheEntry(error=error), is_cached=False)
        except ConstraintRejected as error:
            self._settle(ticket, CacheEntry(error=error))
        except BaseException as error:  # noqa: BLE001 a library's surprise, a panic too, fails this constraint alone
            refused = ConstraintRejected(f"cannot be compiled: {error}", ticket.constraint.field)
            self._settle(ticket, CacheEntry(error=refused), is_cached=False)

    def _settle(self, ticket: Ticket, entry: CacheEntry, *, is_cached: bool = True) -> None:
        entry.settled_s = now_s = self._clock.now_s()
        with self._lock:
            if is_cached:
                self._cache.put(ticket.constraint.key, entry)
            del self._compiling[ticket.constraint.key]
        if entry.grammar is not None:
            ticket.succeed(entry.grammar, entry.backend, now_s, entry.unenforced)
        else:
            ticket.fail(entry.error or ConstraintRejected("refused", ticket.constraint.field), now_s)
