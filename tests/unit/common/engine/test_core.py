"""One engine step after another over fakes: what comes out, and what goes wrong alone."""

from collections.abc import Iterator

import pytest

from common.engine.outputs import TokenDelta
from common.engine.request_state import FinishReason
from common.errors import (
    ConstraintRejected,
    ContextLengthExceeded,
    EngineError,
    GrammarDesynced,
    InvalidRequest,
    NoTokenAllowed,
)
from common.ids import RequestId
from common.telemetry.timeline import Event
from tests.support.fake_engine import ask, greedy, make_engine
from tests.support.fake_grammar import up_to
from tests.support.fake_kv import reference_to
from tests.support.fake_model import EOS, continuation

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def test_batching_chunking_preemption_and_prefix_reuse_never_change_an_output() -> None:
    prompts = [PROMPT[: 3 + i] + [20 + i] * (i % 4) for i in range(9)] * 2
    small = make_engine(num_blocks=16, max_num_seqs=6, max_num_batched_tokens=7)
    for i, prompt in enumerate(prompts):
        small.add(ask(f"r{i}", prompt, greedy(14, ignore_eos=True)))
    small.run()
    status = small.core.status()
    assert status.num_preemptions > 0
    assert status.prompt_tokens_prefix_hit > 0
    for i, prompt in enumerate(prompts):
        assert small.answers.tokens(f"r{i}") == continuation(prompt, 14, ignore_eos=True)
        assert small.answers.finish(f"r{i}") is FinishReason.LENGTH
    assert status.num_blocks_in_use == 0


def test_the_sampler_hears_of_every_token_kept_also_across_preemptions() -> None:
    engine = make_engine(num_blocks=8, max_num_seqs=4)
    for i in range(4):
        engine.add(ask(f"r{i}", [i + 1] * 5, greedy(20, ignore_eos=True)))
    seen_preemption = False
    while engine.step():
        seen_preemption |= engine.core.status().num_preemptions > 0
        for added, recorded in engine.sampler.rows.values():
            said = engine.answers.tokens(added.request_id)
            assert recorded == said[: len(recorded)]
            assert len(said) - len(recorded) <= 1
    assert seen_preemption


def test_a_rejected_schema_ends_its_request_with_the_reason_and_nobody_elses() -> None:
    engine = make_engine(auto=False)
    engine.add(ask("bad", PROMPT, constraint=up_to(3), reference=reference_to(PROMPT, 4)))
    engine.add(ask("good", PROMPT))
    engine.grammars.tickets[0].settle(ConstraintRejected("unknown type", param="response_format"))
    engine.run()
    end = engine.answers.end("bad")
    assert end is not None
    assert isinstance(end.error, ConstraintRejected)
    assert engine.answers.tokens("good") == continuation(PROMPT, 8)
    assert engine.source.plans == []
    assert engine.source.abandoned == ["bad"]


def test_a_free_request_has_no_grammar_stage() -> None:
    engine = make_engine()
    request = ask("a", PROMPT, clock=engine.clock)
    engine.add(request)
    engine.run()
    assert Event.GRAMMAR_READY not in request.timeline.at_s
    assert Event.FINISHED in request.timeline.at_s


def test_structured_rows_are_masked_and_plain_ones_never_are() -> None:
    engine = make_engine(num_blocks=24, max_num_seqs=6)
    for i in range(6):
        constraint = up_to(4 + i, allowed=(2, 3)) if i % 2 else None
        engine.add(ask(f"r{i}", [i + 1] * (4 + i), greedy(12), constraint=constraint))
    engine.core.abort(ask("r3", [1]).request_id)
    engine.run()
    for i in (1, 5):
        tokens = engine.answers.tokens(f"r{i}")
        assert set(tokens[:-1]) <= {2, 3}
        assert (len(tokens), tokens[-1]) == (5 + i, EOS)
    for i in (0, 2, 4):
        assert engine.answers.tokens(f"r{i}") == continuation([i + 1] * (4 + i), 12)


def test_a_token_its_grammar_refuses_ends_that_request_alone() -> None:
    engine = make_engine()
    engine.add(ask("bad", PROMPT, constraint=up_to(5)))
    engine.add(ask("good", PROMPT, constraint=up_to(5)))
    engine.step()
    engine.grammars.matchers[0].refuses_everything = True
    engine.run()
    end = engine.answers.end("bad")
    assert end is not None
    assert isinstance(end.error, GrammarDesynced)
    assert engine.answers.finish("good") is FinishReason.STOP


def test_a_grammar_library_that_raises_ends_its_request_alone() -> None:
    engine = make_engine()
    engine.add(ask("bad", PROMPT, constraint=up_to(5)))
    engine.add(ask("good", PROMPT))
    engine.step()
    engine.grammars.matchers[0].raises = ZeroDivisionError("inside the library")
    engine.run()
    end = engine.answers.end("bad")
    assert end is not None
    assert isinstance(end.error, EngineError)
    assert "inside the library" in str(end.error)
    assert engine.answers.finish("good") is FinishReason.STOP or len(engine.answers.tokens("good")) == 8


def test_masks_that_leave_nothing_end_the_request_and_never_sample_token_zero() -> None:
    engine = make_engine()
    engine.add(ask("bad", PROMPT, constraint=up_to(3, allowed=())))
    engine.add(ask("good", PROMPT))
    engine.run()
    end = engine.answers.end("bad")
    assert end is not None
    assert isinstance(end.error, NoTokenAllowed)
    assert engine.answers.tokens("bad") == []
    assert engine.answers.tokens("good") == continuation(PROMPT, 8)


def test_a_broken_forward_ends_its_batch_and_the_engine_goes_on() -> None:
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.add(ask(name, PROMPT))
    engine.model.fail_next = RuntimeError("device lost")
    engine.run()
    for name in "ab":
        end = engine.answers.end(name)
        assert end is not None
        assert isinstance(end.error, EngineError)
    assert engine.answers.tokens("c") == continuation(PROMPT, 8)
    assert engine.core.status().num_blocks_in_use == 0


def test_choices_come_from_one_prefill_and_end_each_on_their_own() -> None:
    engine = make_engine(max_num_batched_tokens=32)
    engine.add(ask("a", PROMPT, greedy(5, n=4)))
    engine.core.abort(ask("zzz", [1]).request_id)
    engine.run()
    for index in range(4):
        assert engine.answers.tokens("a", index) == continuation(PROMPT, 5)
    assert sum(engine.model.num_tokens[:2]) == len(PROMPT) - 1 + 4


def test_choices_of_a_constrained_request_have_a_matcher_each() -> None:
    engine = make_engine()
    engine.add(ask("a", PROMPT, greedy(9, n=3), constraint=up_to(3)))
    engine.run()
    assert len(engine.grammars.matchers) == 3
    assert all(engine.answers.finish("a", index) is FinishReason.STOP for index in range(3))


def test_aborting_ends_every_choice() -> None:
    engine = make_engine()
    engine.add(ask("a", PROMPT * 4, greedy(5, n=3)))
    engine.step()
    engine.core.abort(ask("a", [1]).request_id)
    engine.run()
    assert [engine.answers.finish("a", index) for index in range(3)] == [FinishReason.ABORTED] * 3
    assert engine.core.status().num_blocks_in_use == 0


def test_a_choice_ended_alone_frees_its_row_and_blocks_at_once_and_its_siblings_go_on() -> None:
    engine = make_engine(max_num_batched_tokens=32)
    engine.add(ask("a", PROMPT, greedy(12, n=3)))
    while not all(engine.answers.tokens("a", index) for index in range(3)):
        engine.step()
    before = engine.core.status()
    engine.core.abort(RequestId("a"), 1)
    engine.step()
    after = engine.core.status()
    assert engine.answers.finish("a", 1) is FinishReason.ABORTED
    assert (after.num_running, len(engine.sampler.rows)) == (before.num_running - 1, 2)
    assert after.num_blocks_in_use < before.num_blocks_in_use
    engine.run()
    for index in (0, 2):
        assert engine.answers.tokens("a", index) == continuation(PROMPT, 12)
    assert engine.core.status().num_blocks_in_use == 0


def test_a_leader_ended_alone_leaves_its_prompt_to_choices_that_still_wait() -> None:
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=32)
    engine.add(ask("a", PROMPT, greedy(6, n=4)))
    while not engine.answers.tokens("a", 0):
        engine.step()
    engine.core.abort(RequestId("a"), 0)
    engine.run()
    assert engine.answers.finish("a", 0) is FinishReason.ABORTED
    for index in (1, 2, 3):
        assert engine.answers.tokens("a", index) == continuation(PROMPT, 6)


def test_prompt_logprobs_cover_every_position_even_when_the_prompt_is_cached() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    prompt = PROMPT * 3
    engine.add(ask("warm", prompt))
    engine.run()
    engine.add(ask("a", prompt, greedy(3, prompt_logprobs=2)))
    engine.run()
    first: TokenDelta = engine.answers.deltas["a", 0][0]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [entry.chosen.token_id for entry in first.prompt_logprobs[1:] if entry is not None] == prompt[1:]
    assert all(delta.prompt_logprobs is None for delta in engine.answers.deltas["a", 0][1:])
    assert engine.answers.tokens("a") == continuation(prompt, 3)


def test_prompt_logprobs_survive_preemption() -> None:
    engine = make_engine(num_blocks=10, max_num_batched_tokens=8)
    engine.add(ask("old", [1] * 5, greedy(24, ignore_eos=True)))
    engine.step()
    engine.add(ask("a", [2] * 17, greedy(6, prompt_logprobs=0, ignore_eos=True)))
    engine.run()
    first = engine.answers.deltas["a", 0][0]
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 17


@pytest.mark.parametrize(
    ("prompt", "changes", "error"),
    [
        ([1] * 50, {"max_tokens": 15}, ContextLengthExceeded),
        ([], {}, InvalidRequest),
    ],
)
def test_what_can_never_be_served_is_refused_at_the_door(
    prompt: list[int], changes: dict[str, int], error: type[Exception]
) -> None:
    engine = make_engine(num_blocks=16)
    with pytest.raises(error):
        engine.core.check(ask("a", prompt, greedy(**changes)))


def test_the_longest_request_that_is_admitted_also_ends() -> None:
    engine = make_engine(num_blocks=4)
    engine.add(ask("a", [1] * 10, greedy(6, ignore_eos=True)))
    engine.run()
    assert engine.answers.tokens("a") == continuation([1] * 10, 6, ignore_eos=True)


def test_step_seconds_are_counted_for_steps_that_computed() -> None:
    engine = make_engine()
    engine.step()
    assert engine.core.status().num_steps == 0
    engine.add(ask("a", PROMPT))
    engine.run()
    assert engine.core.status().num_steps == engine.model.num_forwards


class Watched(list[int]):
    """Tokens that tell how much of them is read at a time."""

    longest_read = 0

    def __getitem__(self, index: object) -> object:  # type: ignore[override]  # watches both kinds of index
        taken = super().__getitem__(index)  # type: ignore[index]  # the same
        self.longest_read = max(self.longest_read, len(taken) if isinstance(taken, list) else 1)
        return taken

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a step walked through the whole history")


def test_a_decode_step_never_reads_its_history() -> None:
    engine = make_engine()
    engine.add(ask("a", PROMPT * 5, greedy(40, ignore_eos=True)))
    while len(engine.answers.tokens("a")) < 3:
        engine.step()
    (request,) = engine.core.scheduler.running
    request.token_ids = Watched(request.token_ids)
    engine.run()
    assert engine.answers.tokens("a") == continuation(PROMPT * 5, 40, ignore_eos=True)
    assert request.token_ids.longest_read <= engine.storage.block_size


def test_the_timeline_of_choices_is_finished_with_the_last_of_them() -> None:
    engine = make_engine(max_num_seqs=1, enable_prefix_cache=False)
    request = ask("a", PROMPT, greedy(3, n=2), clock=engine.clock)
    engine.add(request)
    while engine.answers.end("a", 0) is None:
        engine.step()
    assert Event.FINISHED not in request.timeline.at_s
    engine.run()
    assert Event.FINISHED in request.timeline.at_s
