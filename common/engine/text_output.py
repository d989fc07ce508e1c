"""Token deltas of one choice to text deltas: detokenise, look for stop strings, say how it ended.

Journey row 9, event-loop side. Owns: the precedence of endings: whatever comes first in the output; a stop string
completed by the same token as another ending wins. Does not know the engine: the caller ends a choice that stopped.
"""

from dataclasses import dataclass

from common.engine.detokenizer import Detokenizer
from common.engine.outputs import PositionLogprobs, TokenDelta
from common.engine.request_state import FinishReason
from common.engine.sampling.params import SamplingParams
from common.engine.stop_strings import StopScanner
from common.engine.tokenizer import Tokenizer
from common.errors import Bug


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What is new in the text of one choice.

    Attributes:
        text: safe to show; never part of a stop string unless those are to be included.
        token_ids: tokens up to the ending; those the engine computed beyond a stop string are left out.
        logprobs: one per token when asked for, else empty.
        finish: set exactly once, in the last delta.
        stop_reason: the stop string or stop token id that ended it; None for EOS and every other ending.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_reason: int | str | None = None


class TextOutput:
    """The text of one choice.

    Args:
        tokenizer: the model's.
        sampling: the request's parameters.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens)
        stops = () if sampling.ignore_stops else sampling.stop
        self._scanner = StopScanner(stops, include_stop=sampling.include_stop_str_in_output)
        self._shows_stop_token = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._has_ended = False

    def push(self, delta: TokenDelta) -> TextDelta:
        """Take the engine's next delta of this choice.

        Raises:
            Bug: the choice has ended.
        """
        if self._has_ended:
            raise Bug("a delta after the end of its choice")
        # The token that ended the output is not text, unless the request wants to see its stops.
        hides_last = delta.finish is FinishReason.STOP and not self._shows_stop_token
        shown: list[str] = []
        for place, token_id in enumerate(delta.token_ids):
            is_last = place == len(delta.token_ids) - 1
            stop = self._take(() if hides_last and is_last else (token_id,), shown)
            if stop is not None:
                return self._ended(delta, shown, place + 1, FinishReason.STOP, stop)
        if delta.finish is None:
            return TextDelta(text="".join(shown), token_ids=delta.token_ids, logprobs=delta.logprobs)
        scanned = self._scanner.push(self._detokenizer.flush(), may_stop=self._num_tokens >= self._min_tokens)
        shown.append(scanned.text)
        if scanned.stop is not None:
            return self._ended(delta, shown, len(delta.token_ids), FinishReason.STOP, scanned.stop)
        shown.append(self._scanner.flush())
        return self._ended(delta, shown, len(delta.token_ids), delta.finish, delta.stop_reason)

    def _take(self, token_ids: tuple[int, ...], shown: list[str]) -> str | None:
        """Decode one token (or none, where it is hidden) and append what may be shown; the stop string it completed."""
        self._num_tokens += 1
        text = self._detokenizer.push(token_ids)
        scanned = self._scanner.push(text, may_stop=self._num_tokens >= self._min_tokens)
        shown.append(scanned.text)
        return scanned.stop

    def _ended(
        self, delta: TokenDelta, shown: list[str], num_tokens: int, finish: FinishReason, stop_reason: int | str | None
    ) -> TextDelta:
        self._has_ended = True
        return TextDelta(
            text="".join(shown),
            token_ids=delta.token_ids[:num_tokens],
            logprobs=delta.logprobs[:num_tokens],
            finish=finish,
            stop_reason=stop_reason,
        )
