"""P's handoff: blocks of the prompt go under a lease and come back by it."""

import pytest

from common.engine.ports import KVSink
from common.errors import Bug
from common.ids import BlockId, RequestId
from prefill.handoff import Handoff
from tests.support.kv_pair import Pair


def test_the_reference_names_the_prompts_blocks_and_not_the_room_behind_them() -> None:
    pair = Pair()
    sink: KVSink = Handoff(pair.producer, block_size=4)
    reference = sink.hand_off(RequestId("a"), [BlockId(i) for i in (7, 3, 9)], range(8))
    assert reference.remote_block_ids == (7, 3)
    assert reference.remote_request_id == "a"
    assert reference.remote_num_tokens == 8
    assert sink.poll_released() == ()
    pair.producer.release(reference.lease_id)
    assert sink.poll_released() == (reference.lease_id,)


def test_a_handoff_that_nobody_got_is_given_up() -> None:
    pair = Pair()
    sink: KVSink = Handoff(pair.producer, block_size=4)
    reference = sink.hand_off(RequestId("a"), [BlockId(7)], range(3))
    sink.give_up(RequestId("a"))
    assert sink.poll_released() == (reference.lease_id,)


@pytest.mark.parametrize(("num_blocks", "num_tokens"), [(1, 5), (0, 0)])
def test_a_prompt_that_its_blocks_cannot_hold_is_a_bug(num_blocks: int, num_tokens: int) -> None:
    sink = Handoff(Pair().producer, block_size=4)
    with pytest.raises(Bug):
        sink.hand_off(RequestId("a"), [BlockId(i) for i in range(num_blocks)], range(num_tokens))
