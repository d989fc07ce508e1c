"""Which tokens a step checks beyond the one it must compute: the grammar's word first, then what the text said before.

Journey row 8. Owns: the order of the guessers and the rules every draft obeys: no stop token, nothing the grammar
refuses, nothing beyond `max_tokens`. Does not know: blocks, budgets; the scheduler asks for what it has room for.
"""

from collections.abc import Sequence

import structlog

from common.config.engine import SpeculativeConfig
from common.engine.scheduling.sequence import Request
from common.engine.speculation.guesses import Guesses
from common.engine.speculation.pace import DraftPace

log = structlog.get_logger(__name__)


class Drafter:
    """Implements `common.engine.scheduling.drafting.DraftSource`.

    Args:
        config: who guesses, and how much.
        max_model_len_tokens: no draft reaches beyond.
    """

    def __init__(self, config: SpeculativeConfig, max_model_len_tokens: int) -> None:
        self._config = config
        self._uses_grammar = "grammar" in config.method
        self._uses_ngrams = "ngram" in config.method
        self._max_model_len_tokens = max_model_len_tokens

    @property
    def max_batch(self) -> int:
        """With more requests running than this, nobody drafts: their forward is busy enough."""
        return self._config.disable_by_batch_size

    def draft(self, request: Request, limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that may follow the last token of a running decode; often none."""
        guesses = request.guesses
        if guesses is None:
            guesses = request.guesses = Guesses(self._config)
        limit = min(
            limit,
            request.sampling.max_tokens - request.num_output_tokens - 1,
            self._max_model_len_tokens - request.num_tokens - 1,
        )
        if limit < 1:
            return ()
        try:
            return _checked(self._guess(request, guesses, limit), request)
        except BaseException as error:  # noqa: BLE001 a grammar library's panic is no `Exception`; no guess, no harm
            log.error("speculation.no_guess", request_id=request.request_id, error=repr(error))
            return ()

    def settle(self, request: Request, num_drafted: int, num_right: int) -> None:
        """`num_right` of the `num_drafted` tokens of its last draft came."""
        if request.guesses is not None:
            request.guesses.pace.settle(num_drafted, num_right)

    def _guess(self, request: Request, guesses: Guesses, limit: int) -> Sequence[int]:
        tokens = self._forced(request, guesses.grammar_pace, limit)
        if tokens:
            guesses.pace = guesses.grammar_pace
        elif self._uses_ngrams and guesses.ngram_pace.may_draft():
            guesses.pace = guesses.ngram_pace
            tokens = guesses.ngrams.draft(request.token_ids, min(limit, guesses.pace.length_tokens))
        return tokens

    def _forced(self, request: Request, pace: DraftPace, limit: int) -> Sequence[int]:
        if not self._uses_grammar or request.matcher is None:
            return ()
        forced = request.matcher.forced()
        return forced[: min(limit, pace.length_tokens)] if forced and pace.may_draft() else ()


def _checked(tokens: Sequence[int], request: Request) -> tuple[int, ...]:
    """The leading tokens that are text, and that the grammar would take."""
    stop = next((place for place, token in enumerate(tokens) if token in request.stop_ids), len(tokens))
    draft = tuple(tokens[:stop])
    if draft and request.matcher is not None:
        return draft[: request.matcher.validate(draft)]
    return draft
