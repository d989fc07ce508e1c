"""How long a guesser's next draft for a request may be, learnt from how its last ones fared.

Owns: the numbers of one guesser and one request. Drafts that hold grow; drafts that fail shrink, then pause, ever
longer: a text that cannot be guessed soon costs nothing. Does not know: tokens.
"""

LONGEST_PAUSE_STEPS = 32


class DraftPace:
    """What is known so far.

    Args:
        most_tokens: a draft is never longer.
        first_tokens: length of the first one.
    """

    __slots__ = ("_most_tokens", "_num_failed", "_pause_steps", "length_tokens")

    def __init__(self, most_tokens: int, first_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._num_failed = 0
        self._pause_steps = 0
        self.length_tokens = min(first_tokens, most_tokens)

    def may_draft(self) -> bool:
        """Whether this step drafts; a pause gets one step shorter."""
        if self._pause_steps == 0:
            return True
        self._pause_steps -= 1
        return False

    def settle(self, num_drafted: int, num_right: int) -> None:
        """`num_right` of `num_drafted` tokens were what came."""
        if num_right == num_drafted:
            self.length_tokens = min(self._most_tokens, 2 * self.length_tokens)
        else:
            self.length_tokens = max(1, num_right)
        if num_right:
            self._num_failed = 0
            return
        self._num_failed += 1
        self._pause_steps = min(LONGEST_PAUSE_STEPS, 2**self._num_failed - 1)
