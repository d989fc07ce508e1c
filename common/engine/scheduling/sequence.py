"""The mutable `Request`: one choice of one asked-for generation, from admission to its end.

Journey rows 5, 6, 8. Owns: its state (written by `move_to` alone), its tokens and how much of their KV is here.
Does not know: policy; the scheduler and the core move it.
"""

from collections.abc import Sequence

from common.engine.kv_cache.manager import Holding
from common.engine.outputs import PositionLogprobs
from common.engine.request import GenerateRequest
from common.engine.request_state import TRANSITIONS, FinishReason, RequestState
from common.engine.sampling.params import SamplingParams
from common.engine.speculation.guesses import Guesses
from common.engine.structured_output.grammar import GrammarTicket, Matcher
from common.errors import PDError
from common.ids import RequestId
from common.telemetry.timeline import Event, Timeline
from common.wire.kv_params import KvReference

ARRIVAL_EVENTS = {
    (RequestState.WAITING_FOR_GRAMMAR, RequestState.WAITING): Event.GRAMMAR_READY,
    (RequestState.WAITING, RequestState.WAITING_FOR_REMOTE_KV): Event.PULL_STARTED,
    (RequestState.WAITING_FOR_REMOTE_KV, RequestState.RUNNING): Event.PULL_DONE,
}
"""Moves that are timeline events; the end is marked by `finish`."""


class Request:
    """One choice. `key` is the engine's name for it: the request id for choice 0, `id#index` for the others.

    Attributes:
        arrival: (order of admission, choice index); smaller is served first and preempted last.
        token_ids: prompt, then accepted output.
        num_computed_tokens: leading tokens whose KV is in `holding`.
        holding: its blocks.
        reference: KV of the prompt at a peer, until it was pulled or given up.
        matcher: where it stands in its grammar; None without a constraint.
        group: the choices it was asked with; None for n = 1.
        num_prefix_tokens, num_pulled_tokens: prompt tokens not computed here, by source, at first admission.
        prompt_logprobs: filled as the prompt is computed, when asked for.
        guesses: what drafting keeps of it; None before its first draft.
        num_preemptions: how often it lost its blocks.
        stop_ids: tokens that may end it: the model's EOS ids and its own.
        longest_tokens: prompt and `max_tokens`.
        ends_otherwise: it may also end on a token that is in no such set, before it is that long.
        is_started: whether it was ever scheduled.
    """

    __slots__ = (
        "_finish_reason",
        "_state",
        "arrival",
        "constrained",
        "ends_otherwise",
        "error",
        "group",
        "guesses",
        "hand_off",
        "holding",
        "index",
        "is_started",
        "key",
        "longest_tokens",
        "matcher",
        "num_computed_tokens",
        "num_preemptions",
        "num_prefix_tokens",
        "num_prompt_tokens",
        "num_pulled_tokens",
        "prompt_logprobs",
        "prompt_token_ids",
        "reference",
        "request_id",
        "sampling",
        "seed",
        "stop_ids",
        "thinking",
        "ticket",
        "timeline",
        "token_ids",
    )

    def __init__(
        self,
        request: GenerateRequest,
        *,
        arrival: tuple[int, int],
        sampling: SamplingParams,
        seed: int,
        stop_ids: frozenset[int],
    ) -> None:
        self.request_id = request.request_id
        self.index = arrival[1]
        self.key = RequestId(f"{request.request_id}#{self.index}") if self.index else request.request_id
        self.arrival = arrival
        self.prompt_token_ids = request.prompt_token_ids
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.sampling = sampling
        self.seed = seed
        self.stop_ids = stop_ids
        self.longest_tokens = self.num_prompt_tokens + sampling.max_tokens
        self.ends_otherwise = request.hand_off or sampling.repetition_detection is not None
        self.is_started = False
        self.timeline: Timeline = request.timeline
        self.constrained = request.constraint is not None
        self.reference: KvReference | None = None if self.index else request.reference
        self.hand_off = request.hand_off
        self.thinking = request.thinking
        self.ticket: GrammarTicket | None = None
        self.matcher: Matcher | None = None
        self.group: ChoiceGroup | None = None
        self.guesses: Guesses | None = None
        self.holding = Holding(self.key)
        self.num_computed_tokens = 0
        self.num_prefix_tokens = 0
        self.num_pulled_tokens = 0
        self.num_preemptions = 0
        wants_prompt = sampling.prompt_logprobs is not None and self.index == 0
        self.prompt_logprobs: list[PositionLogprobs | None] | None = [None] if wants_prompt else None
        self.error: PDError | None = None
        self._state = RequestState.WAITING
        self._finish_reason: FinishReason | None = None

    @property
    def state(self) -> RequestState:
        """Where it stands."""
        return self._state

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it lives."""
        return self._finish_reason

    @property
    def is_finished(self) -> bool:
        """Whether it ended."""
        return self._state is RequestState.FINISHED

    @property
    def num_tokens(self) -> int:
        """Prompt plus output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Accepted output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Accepted output, a copy."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is not here yet; 1 for a running decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether prompt positions still lack their log probabilities, so no part of the prompt may be skipped."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    def forget_partial_prompt_logprobs(self) -> None:
        """Its blocks are gone: an unfinished list of prompt log probabilities starts anew."""
        if self.needs_prompt_logits:
            self.prompt_logprobs = [None]

    def leave_blocks(self) -> Holding:
        """Part with its blocks, which somebody may still write into; from now on it holds none. The caller keeps them.

        Names of full blocks stay: its tokens are the same.
        """
        left, self.holding = self.holding, Holding(self.key)
        self.holding.hashes = left.hashes
        return left

    def move_to(self, state: RequestState) -> None:
        """The one writer of the state; marks the timeline.

        Raises:
            IllegalTransition: the table has no such move.
        """
        TRANSITIONS.check(self._state, state)
        event = ARRIVAL_EVENTS.get((self._state, state))
        if event is not None:
            self.timeline.mark(event)
        self._state = state

    def finish(self, reason: FinishReason, error: PDError | None = None) -> None:
        """End it. Its blocks are the scheduler's to free."""
        self.move_to(RequestState.FINISHED)
        self._finish_reason = reason
        self.error = error
        if reason is FinishReason.HANDED_OFF:
            self.timeline.mark(Event.HANDED_OFF)
        if self.group is None or all(member.is_finished for member in self.group.members):
            self.timeline.mark(Event.FINISHED)


class ChoiceGroup:
    """The choices of one request with n > 1: one prefill or pull by the leader, forked by the others.

    Attributes:
        leader: choice 0.
        held: choices that have not been released to fork yet; they are in no queue.
    """

    __slots__ = ("held", "leader", "members")

    def __init__(self, members: Sequence[Request]) -> None:
        self.members = tuple(members)
        self.leader = self.members[0]
        self.held = list(self.members[1:])
        for member in self.members:
            member.group = self

    @property
    def num_shared_tokens(self) -> int:
        """All of the prompt but its last token: every choice computes that one for itself."""
        return self.leader.num_prompt_tokens - 1

    def take_held(self) -> Sequence[Request]:
        """Those that were held; none is any more."""
        held, self.held = self.held, []
        return held

    def donor(self) -> Request | None:
        """A running choice that holds the whole shared prefix, or None."""
        for member in self.members:
            if member.state is RequestState.RUNNING and member.num_computed_tokens >= self.num_shared_tokens:
                return member
        return None
