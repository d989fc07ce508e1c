"""What the scheduler counts, for metrics and tests.

Owns: plain numbers that only grow. Does not know: metric names.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SchedulerCounters:
    """Since the start of the engine.

    Attributes:
        num_preemptions: requests put back to be recomputed for lack of blocks.
        num_pulls_started: reads of remote KV begun.
        num_handoffs: prompts left under a lease.
        prompt_tokens_computed, prompt_tokens_prefix_hit, prompt_tokens_pulled: prompt tokens by where their KV came
            from, each counted once; recomputing after a preemption counts as nothing.
        num_generated_tokens: accepted output tokens.
        num_draft_tokens, num_accepted_draft_tokens: guessed for decodes, and those of them that came true.
        fallbacks: reason -> prompts computed here though a peer had them.
    """

    num_preemptions: int = 0
    num_pulls_started: int = 0
    num_handoffs: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_prefix_hit: int = 0
    prompt_tokens_pulled: int = 0
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)

    def fell_back(self, reason: str) -> None:
        """One more prompt is computed here for `reason`."""
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
