"""The token budget of one step.

Owns: how many tokens and requests still fit. Decodes ask first, so a running decode never waits for prompt chunks.
Does not know: requests.
"""


class StepBudget:
    """Counts down from `max_num_batched_tokens`."""

    __slots__ = ("num_tokens_left",)

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.num_tokens_left = max_num_batched_tokens

    def grant(self, wanted_tokens: int) -> int:
        """Take up to `wanted_tokens`; returns how many were granted, 0 when nothing is left."""
        granted = min(wanted_tokens, self.num_tokens_left)
        self.num_tokens_left -= granted
        return granted
