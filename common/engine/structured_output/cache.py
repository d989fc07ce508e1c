"""The cache of settled compilations, bounded in bytes, positive and negative.

Owns: least-recently-used order, byte accounting, expiry of grammars that were prepared and never used.
Does not know: how to compile. Not thread-safe: the service's lock covers it.
"""

from collections import OrderedDict
from dataclasses import dataclass

from common.engine.structured_output.backend import CompiledGrammar
from common.errors import ConstraintRejected

CacheKey = tuple[str, str, bool, bool, str | None]

_ENTRY_OVERHEAD_BYTES = 512
_QUICK_S = 0.02
_BYTES_PER_SLOW_S = 256 << 20
"""What a compile beyond `_QUICK_S` is taken to leave behind: tables that no text's length foretells (a `multipleOf`
that took 25 ms left 1.5 MB). Too much rather than too little: the bound is on memory."""


@dataclass(slots=True)
class CacheEntry:
    """A grammar, or the reason there is none.

    Attributes:
        grammar, error: exactly one of them is set.
        backend: who compiled it.
        unenforced: see `Ticket.unenforced`.
        settled_s: when it entered.
        num_uses: matchers started from it.
        compile_s: how long its compilation took in this process.
        grammar_bytes: memory of the grammar where a probe has told; otherwise the grammar is asked.
    """

    grammar: CompiledGrammar | None = None
    error: ConstraintRejected | None = None
    backend: str = ""
    unenforced: tuple[str, ...] = ()
    settled_s: float = 0.0
    num_uses: int = 0
    compile_s: float = 0.0
    grammar_bytes: int | None = None

    @property
    def num_bytes(self) -> int:
        """What it weighs, without its key."""
        if self.grammar is not None:
            slow_bytes = int(max(self.compile_s - _QUICK_S, 0.0) * _BYTES_PER_SLOW_S)
            grammar_bytes = self.grammar.num_bytes if self.grammar_bytes is None else self.grammar_bytes
            return grammar_bytes + slow_bytes + _ENTRY_OVERHEAD_BYTES
        return len(str(self.error)) + _ENTRY_OVERHEAD_BYTES


class GrammarCache:
    """Least recently used goes first.

    Args:
        capacity_bytes: most memory of all entries together; an entry larger than that is not kept.
        unused_ttl_s: an entry never used for a request goes after this long.
    """

    def __init__(self, capacity_bytes: int, unused_ttl_s: float) -> None:
        self._capacity_bytes = capacity_bytes
        self._unused_ttl_s = unused_ttl_s
        self._entries: OrderedDict[CacheKey, tuple[CacheEntry, int]] = OrderedDict()
        self._num_bytes = 0
        self._num_evicted = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all entries, as accounted."""
        return self._num_bytes

    @property
    def num_evicted(self) -> int:
        """Entries that left for lack of room or use."""
        return self._num_evicted

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: CacheKey) -> CacheEntry | None:
        """The entry of `key`, now the most recently used."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def put(self, key: CacheKey, entry: CacheEntry) -> None:
        """Add or replace; evicts until everything fits."""
        self._remove(key)
        num_bytes = entry.num_bytes + len(key[1])
        if num_bytes > self._capacity_bytes:
            return
        self._entries[key] = (entry, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._capacity_bytes:
            self._evict(next(iter(self._entries)))

    def expire_unused(self, now_s: float) -> None:
        """Drop grammars that were prepared longer than `unused_ttl_s` ago and never used."""
        cutoff_s = now_s - self._unused_ttl_s
        stale = [
            key
            for key, (entry, _) in self._entries.items()
            if entry.grammar is not None and entry.num_uses == 0 and entry.settled_s < cutoff_s
        ]
        for key in stale:
            self._evict(key)

    def _evict(self, key: CacheKey) -> None:
        self._remove(key)
        self._num_evicted += 1

    def _remove(self, key: CacheKey) -> None:
        found = self._entries.pop(key, None)
        if found is not None:
            self._num_bytes -= found[1]
