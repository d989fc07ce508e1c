"""Which sampled tokens of a step are kept: the first always, the next ones as far as the draft was right.

Journey row 8. Owns: one request's tokens of one step, in order: no token, the grammar, the ending, the draft. Row j of
a request was sampled as if the first j drafted tokens had been accepted, so its token counts exactly when they were.
Does not know: blocks, deltas, other requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.engine.outputs import PositionLogprobs
from common.engine.scheduling.sequence import Request
from common.engine.settings import CoreSettings
from common.engine.step import SampledTokens, ScheduledChunk
from common.engine.stop import Ending, check_stop
from common.errors import EngineError, GrammarDesynced, NoTokenAllowed, PDError


@dataclass(slots=True)
class Kept:
    """What a request got out of a step.

    Attributes:
        token_ids: appended to its output.
        logprobs: one per token when asked for, else empty.
        ending: how the last of them ended it; None: it goes on.
        error: what went wrong behind them; ends it.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
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
    request, kept = chunk.request, Kept()
    for place in range(chunk.num_samples):
        row = first_row + place
        token_id = sampled.token_ids[row]
        if row in sampled.failed_rows:
            kept.error = NoTokenAllowed("no token is allowed")
        else:
            kept.error = _accept(request, token_id)
        if kept.error is not None:
            break
        request.token_ids.append(token_id)
        kept.token_ids.append(token_id)
        logprobs = sampled.logprobs[row]
        if logprobs is not None:
            kept.logprobs.append(logprobs)
        kept.ending = check_stop(request, settings.eos_token_ids, settings.max_model_len_tokens)
        if kept.ending is not None or not _came_true(chunk.draft, place, token_id):
            break
    return kept


def _came_true(draft: Sequence[int], place: int, token_id: int) -> bool:
    return place < len(draft) and draft[place] == token_id


def _accept(request: Request, token_id: int) -> PDError | None:
    """Advance the request's matcher; what went wrong, or None."""
    if request.matcher is None:
        return None
    try:
        accepted = request.matcher.accept((token_id,))
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
