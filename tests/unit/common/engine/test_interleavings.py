"""Whatever the order of grammars, pulls, aborts, preemptions, drafts and failures: every request ends once, with the
right tokens, no pull precedes its grammar, and nothing leaks."""

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.engine.ports import PullPlan, PullStatus
from common.engine.request_state import FinishReason
from common.engine.structured_output.grammar import CompileState
from common.errors import ConstraintRejected
from common.ids import RequestId
from tests.support.fake_engine import MAX_STEPS, FakeEngine, ask, greedy, make_engine
from tests.support.fake_grammar import FakeTicket, up_to
from tests.support.fake_kv import reference_to
from tests.support.fake_model import EOS, VOCAB_SIZE, continuation, next_token
from tests.support.oracle_drafts import OracleDrafts

BLOCK_SIZE = 4
ON_FIRE = "the device is on fire"


@dataclass
class Asked:
    """What was asked, to know what must come out."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    num_choices: int
    grammar_length: int | None
    is_remote: bool
    is_handoff: bool
    ticket: FakeTicket | None = None
    is_aborted: bool = False

    def expected(self) -> list[int]:
        if self.is_handoff:
            return continuation(self.prompt, 1)
        if self.grammar_length is None:
            return continuation(self.prompt, self.max_tokens)
        tokens: list[int] = []
        while len(tokens) < min(self.max_tokens, self.grammar_length):
            tokens.append(next_token(self.prompt + tokens) or 1)
        return [*tokens, EOS] if len(tokens) < self.max_tokens else tokens


@dataclass(frozen=True)
class Wanted:
    """A request to be made."""

    stem: int
    tail: list[int]
    max_tokens: int
    grammar_length: int | None
    kind: str


WANTED = st.builds(
    Wanted,
    stem=st.integers(0, 2),
    tail=st.lists(st.integers(1, 2), min_size=1, max_size=14),
    max_tokens=st.integers(1, 20),
    grammar_length=st.one_of(st.none(), st.none(), st.integers(0, 20)),
    kind=st.sampled_from(["local", "local", "remote", "remote", "handoff", "choices", "remote choices"]),
)
MOSTLY = st.sampled_from([True, True, True, False])


class EngineUnderTrouble(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine: FakeEngine = make_engine(
            num_blocks=14, block_size=BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=6, auto=False
        )
        self.engine.source.before_pull = self._check_invariant
        self.all: dict[str, Asked] = {}

    def _check_invariant(self, plan: PullPlan) -> None:
        asked = self.all[plan.request_id]
        assert asked.ticket is None or asked.ticket.state is CompileState.READY, "a pull before its grammar"
        assert plan.end_token == len(asked.prompt) - 1

    @initialize(wanted=st.lists(WANTED, min_size=3, max_size=6), has_drafts=st.booleans(), seed=st.integers(0, 99))
    def open_the_doors(self, wanted: list[Wanted], has_drafts: bool, seed: int) -> None:
        self.truth: dict[tuple[str, int], list[int]] = {}
        if has_drafts:
            self.engine.core.scheduler.drafts = OracleDrafts(self.truth, VOCAB_SIZE, seed)
        for each in wanted:
            self.submit(each)

    @rule(wanted=WANTED)
    def submit(self, wanted: Wanted) -> None:
        prompt = [7 + wanted.stem] * 9 + wanted.tail
        request_id = f"r{len(self.all)}"
        asked = Asked(
            request_id,
            prompt,
            wanted.max_tokens,
            3 if "choices" in wanted.kind else 1,
            None if wanted.kind == "handoff" else wanted.grammar_length,
            "remote" in wanted.kind,
            wanted.kind == "handoff",
        )
        self.all[request_id] = asked
        for index in range(asked.num_choices):
            self.truth[request_id, index] = asked.expected()
        request = ask(
            request_id,
            prompt,
            greedy(asked.max_tokens, n=asked.num_choices),
            constraint=None if asked.grammar_length is None else up_to(asked.grammar_length),
            reference=reference_to(prompt, BLOCK_SIZE, request_id=request_id) if asked.is_remote else None,
            hand_off=asked.is_handoff,
        )
        ticket = self.engine.core.compile(request)
        assert ticket is None or isinstance(ticket, FakeTicket)
        asked.ticket = ticket
        self.engine.core.add(request, ticket)

    @rule(choice=st.integers(0, 99), is_ok=MOSTLY)
    def settle_grammar(self, choice: int, is_ok: bool) -> None:
        tickets = [ticket for ticket in self.engine.grammars.tickets if ticket.state is CompileState.COMPILING]
        if tickets:
            tickets[choice % len(tickets)].settle(None if is_ok else ConstraintRejected("no"))

    @rule(choice=st.integers(0, 99), status=st.sampled_from(PullStatus))
    def settle_pull(self, choice: int, status: PullStatus) -> None:
        running = sorted(self.engine.source.running)
        if running:
            self.engine.source.settle(running[choice % len(running)], status)

    @rule(choice=st.integers(0, 99))
    def release_lease(self, choice: int) -> None:
        held = sorted(self.engine.sink.held)
        if held:
            self.engine.sink.release(held[choice % len(held)])

    @rule(choice=st.integers(0, 99), is_patient=MOSTLY)
    def abort(self, choice: int, is_patient: bool) -> None:
        alive = [asked for asked in self.all.values() if asked.request_id in self.engine.core._choices]
        pulling = [asked for asked in alive if asked.request_id in self.engine.source.running]
        alive = pulling or alive  # the most delicate moment to leave
        if alive and not is_patient:
            asked = alive[choice % len(alive)]
            asked.is_aborted = True
            self.engine.core.abort(RequestId(asked.request_id))

    @rule(is_lucky=MOSTLY)
    def break_the_next_forward(self, is_lucky: bool) -> None:
        if not is_lucky:
            self.engine.model.fail_next = RuntimeError(ON_FIRE)

    @rule(num_steps=st.integers(1, 9))
    def step(self, num_steps: int) -> None:
        """Work goes on."""
        for _ in range(num_steps):
            self.engine.step()

    @rule(status=st.sampled_from([PullStatus.DONE, PullStatus.DONE, PullStatus.FAILED]))
    def everything_settles(self, status: PullStatus) -> None:
        """Time passes: grammars are ready, pulls end, steps run."""
        for ticket in self.engine.grammars.tickets:
            ticket.settle()
        for _ in range(3):
            for key in list(self.engine.source.running):
                self.engine.source.settle(key, status)
            self.engine.step()

    @invariant()
    def nothing_leaks(self) -> None:
        self.engine.core.kv.check_integrity()

    @invariant()
    def a_pull_writes_only_into_blocks_that_are_held_for_it(self) -> None:
        for plan in self.engine.source.running.values():
            assert not any(self.engine.core.kv._pool.is_free(block_id) for block_id in plan.block_ids)

    def teardown(self) -> None:
        engine = self.engine
        for _ in range(MAX_STEPS):
            for ticket in engine.grammars.tickets:
                ticket.settle()
            for key in list(engine.source.running):
                engine.source.settle(key)
            for lease_id in list(engine.sink.held):
                engine.sink.release(lease_id)
            if not engine.step() and not engine.source.running and not engine.sink.released:
                break
        status = engine.core.status()
        assert status.num_blocks_in_use == 0
        assert status.num_leases_pinned == 0
        assert status.num_running == status.num_waiting == status.num_preempted == status.num_draining == 0
        for asked in self.all.values():
            for index in range(asked.num_choices):
                self._check_ending(asked, index)
        assert not engine.core._choices

    def _check_ending(self, asked: Asked, index: int) -> None:
        finish, tokens = (
            self.engine.answers.finish(asked.request_id, index),
            self.engine.answers.tokens(asked.request_id, index),
        )
        expected = asked.expected()
        assert finish is not None, f"{asked} never ended"
        end = self.engine.answers.end(asked.request_id, index)
        if finish is FinishReason.ABORTED:
            assert asked.is_aborted
        if finish is FinishReason.ERROR:
            assert end is not None
            assert isinstance(end.error, ConstraintRejected) or ON_FIRE in str(end.error), end.error
        if finish in (FinishReason.ABORTED, FinishReason.ERROR):
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
        if asked.is_remote:
            source = self.engine.source
            assert asked.request_id in source.done or asked.request_id in source.abandoned, "the peer was never let go"


EngineUnderTrouble.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestEngineUnderTrouble = EngineUnderTrouble.TestCase
