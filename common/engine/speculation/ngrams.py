"""Where the last tokens of a text stood in it before: what followed there is a guess at what follows here.

Owns: an index that grows with the text, at one entry per token. Idea: prompt lookup decoding (Saxena 2023), `ngram` of
vLLM 0.32 `v1/spec_decode/ngram_proposer.py`. Does not know: requests, grammars.
"""

from collections.abc import Sequence

_MOST_PLACES = 8
"""Earlier places that are compared for the longest match; the latest ones."""


class NgramIndex:
    """Places of every n-gram of one growing token list.

    Args:
        min_tokens: length of the tail that must have stood before; at least 1.
        max_tokens: longest tail that is compared: among places, the longest match wins, then the latest.
    """

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._latest: dict[tuple[int, ...], int] = {}
        self._before: dict[int, int] = {}
        self._num_indexed = 0

    def draft(self, token_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that may come next; empty when the tail is new.

        Args:
            token_ids: the whole text; what an earlier call saw must be its beginning.
            limit: most tokens wanted.
        """
        end = len(token_ids)
        self._take_in(token_ids, end)
        if limit < 1 or end <= self._min_tokens:
            return ()
        place = self._latest.get(tuple(token_ids[end - self._min_tokens : end]))
        best, best_length = None, 0
        for _ in range(_MOST_PLACES):
            if place is None or best_length == self._max_tokens:
                break
            length = self._match_length(token_ids, place, end)
            if length > best_length:
                best, best_length = place, length
            place = self._before.get(place)
        if best is None:
            return ()
        period = end - best  # a match that reaches into the tail goes on in circles
        return tuple(token_ids[best + step % period] for step in range(limit))

    def _take_in(self, token_ids: Sequence[int], end: int) -> None:
        """Index every n-gram that ends before the last token: the tail must not find itself."""
        size = self._min_tokens
        for place in range(max(self._num_indexed + 1, size), end):
            key = tuple(token_ids[place - size : place])
            before = self._latest.get(key)
            if before is not None:
                self._before[place] = before
            self._latest[key] = place
        self._num_indexed = max(self._num_indexed, end - 1)

    def _match_length(self, token_ids: Sequence[int], place: int, end: int) -> int:
        """How many tokens before `place` equal those before `end`, at most `max_tokens`."""
        length = self._min_tokens
        while length < min(self._max_tokens, place) and token_ids[place - 1 - length] == token_ids[end - 1 - length]:
            length += 1
        return length
