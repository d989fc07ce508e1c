"""A frozen picture of the engine for health, metrics and routing.

Owns: the snapshot types. Made by the step loop after each step, read by any thread. Does not know: metric names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds spent in each part (`StepPart`, in its order) of the steps that computed something, since the start."""

    plan: float = 0.0
    forward: float = 0.0
    mask_wait: float = 0.0
    sample: float = 0.0
    apply: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """The engine after its last step. Counters only grow.

    Attributes:
        is_alive: whether the step loop can still serve.
        num_running: choices that take part in steps.
        num_waiting, num_preempted, num_waiting_for_grammar, num_waiting_for_remote_kv: choices by what they wait for.
        num_draining: pulls that nobody waits for any more and that may still write.
        num_blocks_in_use: blocks referenced by requests or leases; reusable content nobody holds is not counted.
        num_blocks_total: size of the pool.
        num_leases_pinned: handoffs whose blocks are still held.
        prompt_tokens_computed, prompt_tokens_prefix_hit, prompt_tokens_pulled: by where their KV came from.
        num_generated_tokens: accepted output tokens.
        num_draft_tokens, num_accepted_draft_tokens: guessed for decodes, and those of them that came true.
        num_steps: steps that computed something.
        step_seconds: where their time went.
        fallbacks: reason -> prompts computed here though a peer had them.
    """

    is_alive: bool = True
    num_running: int = 0
    num_waiting: int = 0
    num_preempted: int = 0
    num_waiting_for_grammar: int = 0
    num_waiting_for_remote_kv: int = 0
    num_draining: int = 0
    num_blocks_in_use: int = 0
    num_blocks_total: int = 0
    num_leases_pinned: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_prefix_hit: int = 0
    prompt_tokens_pulled: int = 0
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_preemptions: int = 0
    num_pulls_started: int = 0
    num_handoffs: int = 0
    num_steps: int = 0
    step_seconds: StepSeconds = StepSeconds()
    fallbacks: Mapping[str, int] = field(default_factory=dict)
