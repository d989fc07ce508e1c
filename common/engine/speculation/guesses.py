"""What drafting keeps of one request from step to step.

Owns: its index of n-grams and its pace. Does not know: the request.
"""

from common.config.engine import SpeculativeConfig
from common.engine.speculation.ngrams import NgramIndex
from common.engine.speculation.pace import DraftPace


class Guesses:
    """What a drafter keeps of one request, as long as the request lives."""

    __slots__ = ("ngrams", "pace")

    def __init__(self, config: SpeculativeConfig) -> None:
        self.pace = DraftPace(config.num_speculative_tokens)
        self.ngrams = NgramIndex(config.prompt_lookup_min, max(config.prompt_lookup_min, config.prompt_lookup_max))
