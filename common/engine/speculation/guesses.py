"""What drafting keeps of one request from step to step.

Owns: its index of n-grams, and the pace of each guesser. Does not know: the request.
"""

from common.config.engine import SpeculativeConfig
from common.engine.speculation.ngrams import NgramIndex
from common.engine.speculation.pace import DraftPace

_FIRST_NGRAM_TOKENS = 2


class Guesses:
    """What a drafter keeps of one request, as long as the request lives.

    Attributes:
        grammar_pace: what a grammar forces is nearly always right, from the first draft on.
        ngram_pace: what followed before has to prove itself.
        pace: of whoever made the last draft.
    """

    __slots__ = ("grammar_pace", "ngram_pace", "ngrams", "pace")

    def __init__(self, config: SpeculativeConfig) -> None:
        most = config.num_speculative_tokens
        self.grammar_pace = DraftPace(most, first_tokens=most)
        self.ngram_pace = DraftPace(most, first_tokens=_FIRST_NGRAM_TOKENS)
        self.pace = self.ngram_pace
        self.ngrams = NgramIndex(config.prompt_lookup_min, max(config.prompt_lookup_min, config.prompt_lookup_max))
