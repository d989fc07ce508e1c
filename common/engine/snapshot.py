"""Taking the engine's picture between two steps.

Owns: which number of `EngineStatus` comes from where. Runs on the step loop. Does not know: who looks at it.
"""

from common.engine.request_state import RequestState
from common.engine.scheduling.scheduler import Scheduler
from common.engine.status import EngineStatus
from common.engine.step_timer import StepTimer


def take_snapshot(scheduler: Scheduler, timer: StepTimer) -> EngineStatus:
    """The engine as it stands; nothing in it changes later."""
    kv, counters = scheduler.kv, scheduler.counters
    num_preempted = sum(request.state is RequestState.PREEMPTED for request in scheduler.waiting)
    return EngineStatus(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) - num_preempted,
        num_preempted=num_preempted,
        num_waiting_for_grammar=len(scheduler.grammar_pending),
        num_waiting_for_remote_kv=len(scheduler.pulling),
        num_draining=len(scheduler.draining),
        num_blocks_in_use=kv.num_in_use,
        num_blocks_total=kv.num_blocks,
        num_leases_pinned=kv.num_pinned_leases,
        prompt_tokens_computed=counters.prompt_tokens_computed,
        prompt_tokens_prefix_hit=counters.prompt_tokens_prefix_hit,
        prompt_tokens_pulled=counters.prompt_tokens_pulled,
        num_generated_tokens=counters.num_generated_tokens,
        num_draft_tokens=counters.num_draft_tokens,
        num_accepted_draft_tokens=counters.num_accepted_draft_tokens,
        num_preemptions=counters.num_preemptions,
        num_pulls_started=counters.num_pulls_started,
        num_handoffs=counters.num_handoffs,
        num_steps=timer.num_steps,
        step_seconds=timer.totals(),
        fallbacks=dict(counters.fallbacks),
    )
