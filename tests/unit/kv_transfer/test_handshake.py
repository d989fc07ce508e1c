"""The handshake: what does not fit is named, strangers get nothing, nonsense is an answer."""

import msgspec
import pytest

from common.errors import HandshakeFailed, IncompatiblePeer, ReferenceRefused
from common.ids import EngineId
from kv_transfer.compatibility import Fingerprint
from kv_transfer.handshake import Answer, HandshakeDesk, HandshakeVisit, HttpReply
from kv_transfer.interface import EngineIdentity
from tests.support.kv_pair import FINGERPRINT, layout_of, pool_of

SECRET = b"s"
ANSWER = Answer(
    engine_id=EngineId("P"), metadata=b"\x00\xff", layout=layout_of(pool_of(4, 4), 4), guard_address=4096, guard_slots=8
)


def a_desk(secret: bytes | None = SECRET, fingerprint: Fingerprint = FINGERPRINT) -> HandshakeDesk:
    return HandshakeDesk(EngineIdentity(engine_id=EngineId("P"), fingerprint=fingerprint), ANSWER, secret)


def a_visit(secret: bytes | None = SECRET, wanted: str = "P") -> HandshakeVisit:
    identity = EngineIdentity(engine_id=EngineId("D"), fingerprint=FINGERPRINT)
    return HandshakeVisit(identity, EngineId(wanted), secret)


@pytest.mark.parametrize("secret", [SECRET, None])
def test_two_engines_that_fit_learn_each_others_memory(secret: bytes | None) -> None:
    desk, visit = a_desk(secret), a_visit(secret)
    visit.judge_offer(desk.offer())
    answer = visit.judge_answer(desk.answer(visit.hello()))
    assert (answer.metadata, answer.layout, answer.guard_address) == (ANSWER.metadata, ANSWER.layout, 4096)


def test_the_first_phase_names_what_differs() -> None:
    desk = a_desk(fingerprint=msgspec.structs.replace(FINGERPRINT, dtype="bfloat16"))
    with pytest.raises(IncompatiblePeer, match=r"dtype .*float32.*bfloat16"):
        a_visit().judge_offer(desk.offer())


def test_p_refuses_what_does_not_fit_and_names_it_too() -> None:
    desk, visit = a_desk(fingerprint=msgspec.structs.replace(FINGERPRINT, chat_template="x")), a_visit()
    reply = desk.answer(visit.hello())
    assert reply.status == 409
    with pytest.raises(IncompatiblePeer, match="chat_template"):
        visit.judge_answer(reply)


def test_a_restarted_engine_on_the_same_port_is_not_taken_for_the_old_one() -> None:
    visit = a_visit(wanted="P-before")
    with pytest.raises(ReferenceRefused, match="gone"):
        visit.judge_offer(a_desk().offer())
    reply = a_desk().answer(visit.hello())
    assert reply.status == 409
    with pytest.raises(ReferenceRefused, match="this is engine P"):
        visit.judge_answer(reply)


@pytest.mark.parametrize("secret", [None, b"other"])
def test_p_gives_its_memory_to_nobody_without_the_secret(secret: bytes | None) -> None:
    reply = a_desk().answer(a_visit(secret).hello())
    assert reply.status == 403
    assert ANSWER.metadata not in reply.body


def test_d_takes_memory_from_nobody_without_the_secret() -> None:
    visit, stranger = a_visit(), a_desk(None)
    with pytest.raises(HandshakeFailed, match="secret"):
        visit.judge_answer(stranger.answer(visit.hello()))


def test_a_recorded_answer_cannot_be_replayed() -> None:
    desk, first, second = a_desk(), a_visit(), a_visit()
    recorded = desk.answer(first.hello())
    with pytest.raises(HandshakeFailed, match="secret"):
        second.judge_answer(recorded)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"engine_id": 1}', b"\xff"])
def test_a_malformed_post_is_answered_400(body: bytes) -> None:
    assert a_desk().answer(body).status == 400


@pytest.mark.parametrize("reply", [HttpReply(200, b"{}"), HttpReply(500, b"oops"), HttpReply(404, b"{}")])
def test_nonsense_from_p_is_a_failed_handshake(reply: HttpReply) -> None:
    with pytest.raises(HandshakeFailed):
        a_visit().judge_offer(reply)
    with pytest.raises(HandshakeFailed):
        a_visit().judge_answer(reply)
