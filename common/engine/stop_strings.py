"""Find stop strings in growing text, and hold back what may still become one.

Journey row 9. Owns: the rule which match counts: the one that is complete first, and of those the longest; so how the
text is cut into pieces never matters. Does not know tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scanned:
    """`text` may be shown; `stop` is the stop string that ended the output, if one did."""

    text: str
    stop: str | None = None


class StopScanner:
    """Scans the text of one output.

    Args:
        stops: the stop strings, none empty.
        include_stop: show the stop string too; then nothing needs to be held back.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._context = ""

    def push(self, text: str, *, may_stop: bool = True) -> Scanned:
        """Take new text.

        Args:
            text: what was added.
            may_stop: False where the output may not end yet: no match may end in `text`.
        """
        if not self._stops:
            return Scanned(text)
        known = len(self._context)
        window = self._context + text
        match = self._first_match(window, known) if may_stop else None
        if match is not None:
            start, end, stop = match
            shown = window[known - len(self._held) : end if self._include_stop else start]
            self._held = self._context = ""
            return Scanned(shown, stop)
        unshown = self._held + text
        keep = 0 if self._include_stop else self._possible_start(unshown)
        self._held = unshown[len(unshown) - keep :]
        self._context = window[max(0, len(window) - self._longest + 1) :] if self._longest > 1 else ""
        return Scanned(unshown[: len(unshown) - keep])

    def flush(self) -> str:
        """What was held back; the output has ended without a stop string."""
        held, self._held, self._context = self._held, "", ""
        return held

    def _first_match(self, window: str, known: int) -> tuple[int, int, str] | None:
        """(start, end, stop) of the first match that ends beyond `known` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop, max(0, known + 1 - len(stop)))
            if start >= 0 and (best is None or (start + len(stop), start) < (best[1], best[0])):
                best = (start, start + len(stop), stop)
        return best

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins one of the stop strings."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
