"""The cache: bounded in bytes, oldest use first, and what was prepared for nobody leaves."""

from dataclasses import dataclass

from common.engine.structured_output.backend import BackendMatcher
from common.engine.structured_output.cache import CacheEntry, CacheKey, GrammarCache
from common.errors import ConstraintRejected


@dataclass(frozen=True)
class Weight:
    """A grammar that only weighs something."""

    num_bytes: int

    def start(self) -> BackendMatcher:
        raise NotImplementedError


def key(name: str) -> CacheKey:
    return ("json", name, True, True, None)


def entry(num_bytes: int = 10_000, **fields: float) -> CacheEntry:
    return CacheEntry(grammar=Weight(num_bytes), backend="fake", **fields)


def test_the_least_recently_used_leaves_when_there_is_no_room() -> None:
    cache = GrammarCache(capacity_bytes=25_000, unused_ttl_s=60.0)
    for name in "ab":
        cache.put(key(name), entry())
    assert cache.get(key("a")) is not None
    cache.put(key("c"), entry())
    assert cache.get(key("b")) is None
    assert cache.get(key("a")) is not None
    assert cache.get(key("c")) is not None
    assert cache.num_evicted == 1
    assert cache.num_bytes <= 25_000


def test_replacing_an_entry_counts_it_once() -> None:
    cache = GrammarCache(capacity_bytes=100_000, unused_ttl_s=60.0)
    cache.put(key("a"), entry())
    once = cache.num_bytes
    cache.put(key("a"), entry())
    assert cache.num_bytes == once
    assert len(cache) == 1


def test_what_does_not_fit_at_all_drives_nothing_out() -> None:
    cache = GrammarCache(capacity_bytes=25_000, unused_ttl_s=60.0)
    cache.put(key("a"), entry())
    cache.put(key("huge"), entry(30_000))
    assert cache.get(key("huge")) is None
    assert cache.get(key("a")) is not None


def test_a_grammar_prepared_for_a_request_that_never_came_expires_and_others_do_not() -> None:
    cache = GrammarCache(capacity_bytes=1 << 20, unused_ttl_s=60.0)
    cache.put(key("prepared"), entry(settled_s=0.0))
    used = entry(settled_s=0.0)
    used.num_uses = 1
    cache.put(key("used"), used)
    cache.put(key("refused"), CacheEntry(error=ConstraintRejected("no", "f"), settled_s=0.0))
    cache.put(key("fresh"), entry(settled_s=50.0))
    cache.expire_unused(61.0)
    assert [cache.get(key(name)) is not None for name in ("prepared", "used", "refused", "fresh")] == [
        False,
        True,
        True,
        True,
    ]


def test_what_took_long_to_compile_is_taken_to_hold_more_than_its_text_says() -> None:
    cache = GrammarCache(capacity_bytes=1 << 30, unused_ttl_s=60.0)
    cache.put(key("quick"), entry(compile_s=0.003))
    quick = cache.num_bytes
    cache.put(key("slow"), entry(compile_s=0.5))
    assert cache.num_bytes - quick > 100 << 20


def test_what_a_probe_has_weighed_is_not_weighed_again() -> None:
    cache = GrammarCache(capacity_bytes=1 << 30, unused_ttl_s=60.0)
    cache.put(key("asked"), entry(num_bytes=10_000))
    asked = cache.num_bytes
    cache.put(key("told!"), entry(num_bytes=10_000, grammar_bytes=70_000))
    assert cache.num_bytes - 2 * asked == 60_000
