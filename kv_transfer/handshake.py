"""Two phases over P's HTTP port: first whether the engines fit, then where P's memory is.

    D                                   P
    GET  /kv/handshake  ─────────────►  Offer(engine_id, fingerprint)          D names what differs, or goes on
    POST /kv/handshake  Hello ───────►  Answer(metadata, layout, guard table)  P names what differs: 409

With a shared secret both bodies of phase two carry an HMAC: P gives its memory's address to no stranger, and D takes
it from none. Owns: messages, codec, checks, P's side. Does not know: HTTP servers or clients.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from common.errors import HandshakeFailed, IncompatiblePeer, ReferenceRefused
from common.ids import EngineId
from common.wire.kv_layout import KvLayout
from kv_transfer.compatibility import Fingerprint, differences
from kv_transfer.interface import EngineIdentity

PATH = "/kv/handshake"
MAX_BODY_BYTES = 16 << 20


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """P's answer to GET. Unknown fields are ignored, so that a newer peer can still say that it differs."""

    engine_id: EngineId
    fingerprint: Fingerprint


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """D's POST: who it is, whom it wants, and a nonce."""

    engine_id: EngineId
    wanted_engine_id: EngineId
    fingerprint: Fingerprint
    nonce: str
    proof: str | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """P's answer to POST: agent metadata (base64 in JSON), its pool, and its guard table."""

    engine_id: EngineId
    metadata: bytes
    layout: KvLayout
    guard_address: int
    guard_slots: int
    proof: str | None = None


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """P's no. `cause` is `incompatible`, `other_engine`, `not_authentic` or `malformed`."""

    cause: str
    message: str


@dataclass(frozen=True, slots=True)
class HttpReply:
    """What the HTTP route sends: status and JSON body."""

    status: int
    body: bytes


class HandshakeDesk:
    """P's side. Static after start-up, so any thread may ask it.

    Args:
        identity: who answers.
        answer: metadata, layout and guard table, without proof.
        secret: shared with D; None answers anyone.
    """

    def __init__(self, identity: EngineIdentity, answer: Answer, secret: bytes | None) -> None:
        self._identity = identity
        self._answer = answer
        self._secret = secret

    def offer(self) -> HttpReply:
        """Phase one (GET)."""
        offer = Offer(engine_id=self._identity.engine_id, fingerprint=self._identity.fingerprint)
        return HttpReply(200, msgspec.json.encode(offer))

    def answer(self, body: bytes) -> HttpReply:
        """Phase two (POST). Never raises: what is wrong with `body` is the reply (400, 403, 409)."""
        try:
            hello = msgspec.json.decode(body, type=Hello)
        except msgspec.DecodeError as error:
            return _refuse(400, "malformed", f"not a handshake: {error}")
        if not _is_authentic(hello.proof, _hello_mac(hello, self._secret)):
            return _refuse(403, "not_authentic", "the handshake is not signed with this engine's secret")
        if hello.wanted_engine_id != self._identity.engine_id:
            message = f"this is engine {self._identity.engine_id}, not {hello.wanted_engine_id}"
            return _refuse(409, "other_engine", message)
        differing = differences(self._identity.fingerprint, hello.fingerprint)
        if differing:
            return _refuse(409, "incompatible", "the engines differ in " + ", ".join(differing))
        proof = _answer_mac(self._answer, hello.nonce, self._secret)
        return HttpReply(200, msgspec.json.encode(msgspec.structs.replace(self._answer, proof=proof)))


class HandshakeVisit:
    """D's side of one handshake: what to send and how to judge what comes back. Pure.

    Args:
        identity: who asks.
        wanted: the engine that the reference names.
        secret: shared with P.
    """

    def __init__(self, identity: EngineIdentity, wanted: EngineId, secret: bytes | None) -> None:
        self._identity = identity
        self._wanted = wanted
        self._secret = secret
        self._nonce = secrets.token_hex(16)

    def judge_offer(self, reply: HttpReply) -> None:
        """Phase one.

        Raises:
            HandshakeFailed: not an offer.
            ReferenceRefused: another engine lives at this address now.
            IncompatiblePeer: names what differs.
        """
        offer = _decode(reply, Offer)
        if offer.engine_id != self._wanted:
            raise ReferenceRefused(f"engine {self._wanted} is gone; {offer.engine_id} answers in its place")
        differing = differences(self._identity.fingerprint, offer.fingerprint)
        if differing:
            raise IncompatiblePeer("the engines differ in " + ", ".join(differing))

    def hello(self) -> bytes:
        """Body of phase two."""
        hello = Hello(
            engine_id=self._identity.engine_id,
            wanted_engine_id=self._wanted,
            fingerprint=self._identity.fingerprint,
            nonce=self._nonce,
        )
        return msgspec.json.encode(msgspec.structs.replace(hello, proof=_hello_mac(hello, self._secret)))

    def judge_answer(self, reply: HttpReply) -> Answer:
        """Phase two.

        Raises:
            HandshakeFailed: not an answer, or not signed by P.
            ReferenceRefused: another engine lives at this address now.
            IncompatiblePeer: names what differs.
        """
        answer = _decode(reply, Answer)
        if answer.engine_id != self._wanted:
            raise ReferenceRefused(f"engine {self._wanted} is gone; {answer.engine_id} answers in its place")
        if not _is_authentic(answer.proof, _answer_mac(answer, self._nonce, self._secret)):
            raise HandshakeFailed("the peer does not know the shared secret")
        return answer


MessageT = TypeVar("MessageT", Offer, Answer)


def _decode(reply: HttpReply, kind: type[MessageT]) -> MessageT:
    if reply.status != 200:
        raise _refusal_error(reply)
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except msgspec.DecodeError as error:
        raise HandshakeFailed(f"the peer's handshake makes no sense: {error}") from error


def _refusal_error(reply: HttpReply) -> HandshakeFailed | ReferenceRefused:
    try:
        refusal = msgspec.json.decode(reply.body, type=Refusal)
    except msgspec.DecodeError:
        return HandshakeFailed(f"the peer answered the handshake with status {reply.status}")
    if refusal.cause == "incompatible":
        return IncompatiblePeer(refusal.message)
    if refusal.cause == "other_engine":
        return ReferenceRefused(refusal.message)
    return HandshakeFailed(refusal.message)


def _refuse(status: int, cause: str, message: str) -> HttpReply:
    return HttpReply(status, msgspec.json.encode(Refusal(cause=cause, message=message)))


def _is_authentic(proof: str | None, expected: str | None) -> bool:
    if expected is None:
        return True
    return proof is not None and hmac.compare_digest(proof.encode(), expected.encode())


def _hello_mac(hello: Hello, secret: bytes | None) -> str | None:
    if secret is None:
        return None
    parts = ("hello", hello.engine_id, hello.wanted_engine_id, hello.nonce)
    return hmac.new(secret, msgspec.msgpack.encode(parts), hashlib.sha256).hexdigest()


def _answer_mac(answer: Answer, nonce: str, secret: bytes | None) -> str | None:
    if secret is None:
        return None
    parts = ("answer", nonce, msgspec.structs.replace(answer, proof=None))
    return hmac.new(secret, msgspec.msgpack.encode(parts), hashlib.sha256).hexdigest()
