"""Drafts that are right as often as a test wants: the truth is told before, and lies are mixed in by a seed."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.engine.scheduling.sequence import Request


@dataclass
class OracleDrafts:
    """A `DraftSource`. `truth` maps (request id, choice) to the whole output; requests it does not know get lies.

    Counts what it was told: `num_drafted`, `num_right`.
    """

    truth: Mapping[tuple[str, int], Sequence[int]]
    vocab_size: int
    seed: int = 0
    most_tokens: int = 5
    lie_rate: float = 0.25
    max_batch: int = 64
    num_drafted: int = 0
    num_right: int = 0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def draft(self, request: Request, limit: int) -> tuple[int, ...]:
        known = self.truth.get((request.request_id, request.index), ())
        coming = known[request.num_output_tokens :]
        wanted = self.rng.randint(0, self.most_tokens)
        left = request.sampling.max_tokens - request.num_output_tokens - 1
        tokens = []
        for place in range(min(wanted, limit, left)):
            is_lie = place >= len(coming) or self.rng.random() < self.lie_rate
            tokens.append(self.rng.randrange(self.vocab_size) if is_lie else coming[place])
        if request.matcher is not None and tokens:
            tokens = tokens[: request.matcher.validate(tokens)]
        return tuple(tokens)

    def settle(self, request: Request, num_drafted: int, num_right: int) -> None:
        assert 0 <= num_right <= num_drafted
        self.num_drafted += num_drafted
        self.num_right += num_right
