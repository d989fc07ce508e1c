"""Which sampled tokens of a step are kept: the first always, the next ones as far as the draft was right.

Journey row 8. Owns: one request's tokens of one step, in order: no token, the grammar, the ending, the draft. Row j of
a request was sampled as if the first j drafted tokens had been accepted, so its token counts exactly when they were.
Does not know: blocks, deltas, other requests.
"""

import msgspec

from common.engine.outputs import PositionLogprobs
from common.engine.scheduling.sequence import Request
from common.engine.settings import CoreSettings
from common.engine.step import SampledTokens, ScheduledChunk
from common.engine.stop import Ending, check_stop
from common.engine.structured_output.grammar import Matcher
from common.errors import EngineError, GrammarDesynced, NoTokenAllowed, PDError


class Kept(msgspec.Struct, frozen=True):
    """What a request got out of a step.

    Attributes:
        token_ids: appended to its output.
        logprobs: one per token when asked for, else empty.
        ending: how the last of them ended it; None: it goes on.
        error: what went wrong behind them; ends it.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    ending: Ending | None = None
    error: PDError | None = None


def keep_sampled(chunk: ScheduledChunk, first_row: int, sampled: SampledTokens, settings: CoreSettings) -> Kept:
    """Append what was sampled for `chunk` to its request, as far as it counts.

    Args:
        chunk: a sampling one.
        first_row: its first logits row; the others follow.
        sampled: of the whole step.
        settings: where outputs end.
    """
    kept = _keep_one(chunk.request, first_row, sampled, settings)
    if not chunk.draft:
        return kept
    token_ids, logprobs = kept.token_ids, kept.logprobs
    for place, drafted in enumerate(chunk.draft, 1):
        if kept.error is not None or kept.ending is not None or token_ids[-1] != drafted:
            break
        kept = _keep_one(chunk.request, first_row + place, sampled, settings)
        token_ids += kept.token_ids
        logprobs += kept.logprobs
    return Kept(token_ids, logprobs, kept.ending, kept.error)


def _keep_one(request: Request, row: int, sampled: SampledTokens, settings: CoreSettings) -> Kept:
    token_id = sampled.token_ids[row]
    if row in sampled.failed_rows:
        return Kept(error=NoTokenAllowed("no token is allowed"))
    error = None if request.matcher is None else _accept(request.matcher, token_id)
    if error is not None:
        return Kept(error=error)
    request.token_ids.append(token_id)
    logprobs = sampled.logprobs[row]
    ending = check_stop(request, settings.eos_token_ids, settings.max_model_len_tokens)
    return Kept((token_id,), () if logprobs is None else (logprobs,), ending)


def _accept(matcher: Matcher, token_id: int) -> PDError | None:
    """Advance a request's matcher; what went wrong, or None."""
    try:
        accepted = matcher.accept((token_id,))
    except Exception as error:  # noqa: BLE001 - grammar libraries raise anything; it is this request's failure
        return as_engine_error(error, "the grammar broke")
    return None if accepted else GrammarDesynced(f"token {token_id} was sampled but its grammar refuses it")


def as_engine_error(error: Exception, what: str) -> PDError:
    """`error` itself when it is one of ours, else an `EngineError` that names it."""
    if isinstance(error, PDError):
        return error
    wrapped = EngineError(f"{what}: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
