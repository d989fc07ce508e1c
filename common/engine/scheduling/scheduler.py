"""Continuous batching: which requests compute how many tokens in the next step.

Journey rows 6, 8. Owns: every request from admission to its end, and their blocks. `plan` decides, the core executes,
`apply` records what was computed. Synchronous, free of I/O.
Does not know: models, samplers, peers. The rule it must never break: no pull before the grammar is ready (DESIGN §3).
"""

from collections.abc import Sequence

from common.engine.kv_cache.manager import Holding, KvCacheManager
from common.engine.ports import PullOutcome, PullPlan, PullStatus
from common.engine.request_state import FinishReason, RequestState
from common.engine.scheduling.counters import SchedulerCounters
from common.engine.scheduling.drafting import DraftSource, spare_draft
from common.engine.scheduling.plan_draft import PlanDraft
from common.engine.scheduling.preemption import make_room
from common.engine.scheduling.queue import WaitingQueue
from common.engine.scheduling.sequence import Request
from common.engine.scheduling.steady import SteadyDecodes
from common.engine.step import StepPlan
from common.errors import PDError
from common.ids import BlockId, RequestId
from common.telemetry.timeline import Event


class Scheduler:
    """Queues and policy.

    Every live request is in exactly one of: `waiting`, `grammar_pending`, `pulling`, `running`, or held by its choice
    group. `draining` keeps the blocks of pulls that nobody waits for any more, while they may still be written.

    Args:
        kv: the blocks.
        max_num_seqs: most requests that run or pull at a time.
        max_num_batched_tokens: token budget of a step; at least `max_num_seqs`, so that no decode ever has to wait.
        drafts: guesses tokens for decodes to check; None: one token at a time.
    """

    def __init__(
        self,
        kv: KvCacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        drafts: DraftSource | None = None,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"a budget of {max_num_batched_tokens} tokens would starve {max_num_seqs} decodes")
        self.kv = kv
        self.counters = SchedulerCounters()
        self.waiting = WaitingQueue()
        self.running = WaitingQueue()
        self.grammar_pending: dict[RequestId, Request] = {}
        self.pulling: dict[RequestId, Request] = {}
        self.draining: dict[RequestId, Holding] = {}
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.drafts = drafts
        self._steady = SteadyDecodes()
        self._left: list[RequestId] = []
        self._cancelled: list[RequestId] = []
        self._abandoned: list[RequestId] = []

    # -- what happens to requests ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Admit a request (the leader of its choices); the others wait in its group."""
        if request.constrained:
            request.move_to(RequestState.WAITING_FOR_GRAMMAR)
            self.grammar_pending[request.key] = request
        else:
            self.waiting.push(request)

    def grammar_ready(self, request: Request) -> None:
        """Its matcher exists: from now on blocks may be reserved and a pull started."""
        del self.grammar_pending[request.key]
        request.move_to(RequestState.WAITING)
        self.waiting.push(request)

    def finish(self, request: Request, reason: FinishReason, error: PDError | None = None) -> list[Request]:
        """End a request, whatever it is doing, and give back what it holds.

        Returns:
            Every request that ended: itself, and choices that waited to fork from it.
        """
        group = request.group
        held = group.take_held() if group is not None and group.leader is request else ()
        ended = [request, *held]
        self._take_out(request)
        for member in ended:
            member.finish(reason, error)
        return ended

    def settle_pull(self, outcome: PullOutcome) -> Request | None:
        """A pull ended. Done: its request runs. Failed: its blocks are free and it waits to be computed here.

        Late: it waits to be computed into other blocks; those of the pull drain until its end is known.

        Returns:
            The request when its pull failed or is late, so that the policy can end it instead; None otherwise.
        """
        is_late = outcome.status is PullStatus.LATE
        drained = None if is_late else self.draining.pop(outcome.request_id, None)
        if drained is not None:
            self.kv.free(drained)
            if outcome.status is not PullStatus.DONE:
                self._abandoned.append(outcome.request_id)
            return None
        request = self.pulling.pop(outcome.request_id, None)
        if request is None:
            return None
        request.reference = None
        if outcome.status is PullStatus.DONE:
            request.num_computed_tokens = request.num_prefix_tokens + request.num_pulled_tokens
            self.kv.enter_computed(request.holding, request.token_ids, request.num_computed_tokens)
            self.counters.prompt_tokens_prefix_hit += request.num_prefix_tokens
            self.counters.prompt_tokens_pulled += request.num_pulled_tokens
            request.move_to(RequestState.RUNNING)
            self.running.push(request)
            return None
        if is_late:
            self.draining[request.key] = request.leave_blocks()
        else:
            self._abandoned.append(request.key)
            self.kv.free(request.holding)
        request.num_prefix_tokens = request.num_pulled_tokens = 0
        request.move_to(RequestState.WAITING)
        self.waiting.push(request)
        return request

    def apply(self, plan: StepPlan) -> None:
        """The plan's forward is done: the tokens of its chunks have their KV, drafted ones until it is known better."""
        block_size = self.kv.block_size
        for chunk in plan.chunks:
            request, start = chunk.request, chunk.start
            end = start + chunk.num_tokens - len(chunk.draft)
            request.num_computed_tokens = end
            if end // block_size > request.holding.num_entered:
                self.kv.enter_computed(request.holding, request.token_ids, end)
            if start < request.num_prompt_tokens and request.num_preemptions == 0:
                self.counters.prompt_tokens_computed += min(end, request.num_prompt_tokens) - start

    def settle_draft(self, request: Request, num_drafted: int, num_right: int) -> None:
        """So many drafted tokens came true and were appended: all tokens but the last have their KV."""
        self.counters.num_draft_tokens += num_drafted
        self.counters.num_accepted_draft_tokens += num_right
        if num_right:
            request.num_computed_tokens = request.num_tokens - 1
            self.kv.enter_computed(request.holding, request.token_ids, request.num_computed_tokens)
        if self.drafts is not None:
            self.drafts.settle(request, num_drafted, num_right)

    # -- the plan ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Decide the next step. Reserves blocks and moves states, computes and sends nothing."""
        num_running = len(self.running)
        has_news = self._left or self._cancelled or self._abandoned
        may_draft = self.drafts is not None and num_running <= self.drafts.max_batch
        may_admit = self.waiting and num_running + len(self.pulling) < self._max_num_seqs
        plan = None if has_news or may_draft or may_admit else self._steady.next_plan(self.running, self.kv)
        return plan or self._plan_anew()

    def _plan_anew(self) -> StepPlan:
        draft = PlanDraft(self._max_num_batched_tokens)
        self._schedule_running(draft)
        if not draft.has_preempted:
            self._admit_waiting(draft)
        for chunk in draft.chunks:
            timeline = chunk.request.timeline
            if not chunk.request.is_started and Event.SCHEDULED not in timeline.at_s:  # the first of its choices
                timeline.mark(Event.SCHEDULED)
                draft.started.append(chunk.request.request_id)
            chunk.request.is_started = True
        plan = draft.freeze(self._left, self._cancelled, self._abandoned)
        self._left, self._cancelled, self._abandoned = [], [], []
        self._steady.remember(plan)
        return plan

    def _schedule_running(self, draft: PlanDraft) -> None:
        def preempt(victim: Request) -> None:
            """Preempt `victim`; the plan knows that somebody was."""
            self._preempt(victim)
            draft.has_preempted = True

        for request in self.running:
            is_decode = request.state is RequestState.RUNNING and request.num_uncomputed_tokens == 1
            # Decodes come oldest first and victims are newer, so nothing scheduled is ever taken back.
            if is_decode and make_room(request, self.running, self.kv, preempt):
                drafted = spare_draft(self.drafts, request, draft.budget, self.running, self.kv)
                self._schedule_chunk(request, draft, drafted)
        for request in self.running:
            if request.num_uncomputed_tokens > 1:
                self._schedule_chunk(request, draft)

    def _schedule_chunk(self, request: Request, draft: PlanDraft, drafted: tuple[int, ...] = ()) -> None:
        wanted_tokens, group = request.num_uncomputed_tokens, request.group
        if group is not None and group.leader is request and group.held:
            num_missing = group.num_shared_tokens - request.num_computed_tokens
            if num_missing <= 0:
                for member in group.take_held():
                    self.waiting.push(member)
                draft.has_released = True
            else:
                wanted_tokens = min(wanted_tokens, num_missing)
        draft.add_chunk(request, wanted_tokens, drafted)

    def _admit_waiting(self, draft: PlanDraft) -> None:
        """Let requests in, oldest first, until one finds no room; newcomers released meanwhile get a second round."""
        for request in self.waiting:
            if len(self.running) + len(self.pulling) >= self._max_num_seqs or not self._try_admit(request, draft):
                break
        if draft.has_released:
            draft.has_released = False
            self._admit_waiting(draft)

    def _try_admit(self, request: Request, draft: PlanDraft) -> bool:
        """Admit `request` if it can be; False when blocks lack, so nobody behind it may overtake it to them."""
        group = request.group
        donor = group.donor() if group is not None and request.num_output_tokens == 0 else None
        if donor is not None and group is not None:
            return self._admit_fork(request, donor, group.num_shared_tokens, draft)
        prefix = [] if request.needs_prompt_logits else self.kv.find_prefix(request.holding, request.token_ids)
        if request.reference is not None:
            plan_end = min(request.num_prompt_tokens - 1, request.reference.remote_num_tokens)
            if request.needs_prompt_logits:
                self.counters.fell_back("prompt_logprobs")
            elif plan_end > len(prefix) * self.kv.block_size:
                return self._admit_pull(request, prefix, plan_end, draft)
            request.reference = None
            self._abandoned.append(request.key)
        return self._admit_local(request, prefix, draft)

    def _admit_local(self, request: Request, prefix: Sequence[BlockId], draft: PlanDraft) -> bool:
        if draft.budget.num_tokens_left == 0 or (request.needs_prompt_logits and draft.num_prompt_logits_left == 0):
            return True
        if not self._has_room(self.kv.num_blocks_to_admit(request.num_tokens, prefix)):
            return False
        self.kv.admit(request.holding, request.num_tokens, prefix)
        request.num_computed_tokens = len(prefix) * self.kv.block_size
        if request.num_preemptions == 0:
            request.num_prefix_tokens = request.num_computed_tokens
            self.counters.prompt_tokens_prefix_hit += request.num_computed_tokens
        self._start(request, draft)
        return True

    def _admit_pull(self, request: Request, prefix: Sequence[BlockId], end_token: int, draft: PlanDraft) -> bool:
        if not self._has_room(self.kv.num_blocks_to_admit(request.num_tokens, prefix)):
            return False
        self.kv.admit(request.holding, request.num_tokens, prefix)
        block_size, start_token = self.kv.block_size, len(prefix) * self.kv.block_size
        request.num_prefix_tokens, request.num_pulled_tokens = start_token, end_token - start_token
        self.waiting.remove(request)
        request.move_to(RequestState.WAITING_FOR_REMOTE_KV)
        self.pulling[request.key] = request
        self.counters.num_pulls_started += 1
        assert request.reference is not None  # checked by the caller; the pull plan is made of it
        draft.pulls.append(
            PullPlan(
                request_id=request.key,
                reference=request.reference,
                start_token=start_token,
                end_token=end_token,
                block_ids=tuple(request.holding.table.slice(len(prefix), -(-end_token // block_size))),
                block_size=block_size,
            )
        )
        return True

    def _admit_fork(self, request: Request, donor: Request, num_shared: int, draft: PlanDraft) -> bool:
        if draft.budget.num_tokens_left == 0:
            return True
        if not self._has_room(self.kv.num_blocks_to_fork(num_shared, request.num_tokens)):
            return False
        copy = self.kv.fork(donor.holding, request.holding, num_shared, request.num_tokens)
        if copy is not None:
            draft.copies.append(copy)
        request.num_computed_tokens = num_shared
        request.num_prefix_tokens, request.num_pulled_tokens = donor.num_prefix_tokens, donor.num_pulled_tokens
        self._start(request, draft)
        return True

    def _start(self, request: Request, draft: PlanDraft) -> None:
        self.waiting.remove(request)
        request.move_to(RequestState.RUNNING)
        self.running.push(request)
        self._schedule_chunk(request, draft)

    def _has_room(self, num_blocks: int) -> bool:
        """Whether a newcomer may take `num_blocks` and still leave each running request one to grow into."""
        return num_blocks + len(self.running) <= self.kv.num_free

    # -- leaving -----------------------------------------------------------------------------------------------------

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._left.append(request.key)
        self.kv.free(request.holding)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.forget_partial_prompt_logprobs()
        self.counters.num_preemptions += 1
        request.move_to(RequestState.PREEMPTED)
        self.waiting.push(request)

    def _take_out(self, request: Request) -> None:
        """Remove `request` from wherever it stands; blocks under a running pull stay until its outcome."""
        key, state = request.key, request.state
        if state is RequestState.WAITING_FOR_REMOTE_KV:
            self.draining[key] = self.pulling.pop(key).leave_blocks()
            self._cancelled.append(key)
            request.reference = None
            return
        if state is RequestState.RUNNING:
            self.running.remove(request)
            self._left.append(key)
        elif state is RequestState.WAITING_FOR_GRAMMAR:
            del self.grammar_pending[key]
        elif request.group is not None and request in request.group.held:
            request.group.held.remove(request)
        else:
            self.waiting.remove(request)
        if request.reference is not None:
            request.reference = None
            self._abandoned.append(key)
        self.kv.free(request.holding)
