"""What a request says about KV: hand it over, take it from a reference, or neither (journey rows 4 and 5).

Owns: reading and checking that before anything else of the body, and telling P when the rest is refused.
Does not know: signatures, leases.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.engine.request import GenerateRequest
from common.errors import InvalidRequest, NotReady, NotSupported
from common.openai import requests
from common.openai.requests import KvFields
from common.serving.ports import Engine, References, TokenStream
from common.wire import kv_params
from common.wire.kv_params import KvReference, PrefillAsk


@dataclass(frozen=True, slots=True)
class KvIntent:
    """At most one of the two is set."""

    ask: PrefillAsk | None = None
    reference: KvReference | None = None

    @property
    def ignores_constraint(self) -> bool:
        """Whether the constraint's fields shape the prompt only."""
        return self.ask is not None and self.ask.constraint == "ignore"


class KvGate:
    """Reads intents for one engine.

    Args:
        references: D's check of references; None on P, where they are refused.
        hands_off: whether this engine can hand KV over (P).
    """

    def __init__(self, references: References | None, *, hands_off: bool) -> None:
        self._references = references
        self._hands_off = hands_off

    def read(self, body: bytes) -> KvIntent:
        """The body's intent; a reference in it has been checked.

        Raises:
            InvalidRequest: not JSON, or malformed parameters.
            NotSupported: this engine does not do that.
            ReferenceRefused: a reference that must not be used, where policy is to fail.
        """
        parsed = kv_params.parse(requests.read(body, KvFields).kv_transfer_params)
        if isinstance(parsed, PrefillAsk):
            if not self._hands_off:
                raise NotSupported("this engine does not hand KV over", param=kv_params.FIELD)
            return KvIntent(ask=parsed)
        if isinstance(parsed, KvReference):
            if self._references is None:
                raise NotSupported("this engine does not read KV of other engines", param=kv_params.FIELD)
            return KvIntent(reference=self._references.admit(parsed))
        return KvIntent()

    @contextmanager
    def telling_on_refusal(self, intent: KvIntent) -> Iterator[None]:
        """P is told at once when the block does not end well: refused, or the client has left."""
        try:
            yield
        except BaseException as error:
            self._refuse(intent.reference, error)
            raise

    def guard(self, engine: Engine) -> Engine:
        """`engine`, with P told when it does not take a request on."""
        return _TellingEngine(engine, self)

    def submit(self, engine: Engine, request: GenerateRequest) -> TokenStream:
        """Hand `request` in; what the engine took on it releases by itself."""
        try:
            return engine.submit(request)
        except BaseException as error:
            self._refuse(request.reference, error)
            raise

    def _refuse(self, reference: KvReference | None, error: BaseException) -> None:
        # An engine that is going away says nothing about the request: another D may still read the KV.
        if reference is not None and self._references is not None and not isinstance(error, NotReady):
            self._references.refuse(reference)


class _TellingEngine:
    """An engine that tells P about requests it refused."""

    def __init__(self, engine: Engine, gate: KvGate) -> None:
        self._engine = engine
        self._gate = gate

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Submit `request`; what the engine refuses, P learns of."""
        return self._gate.submit(self._engine, request)


def check_single_prompt(intent: KvIntent, num_prompts: int) -> None:
    """Raise `InvalidRequest` when KV parameters, which describe one prompt, come with several."""
    if num_prompts != 1 and (intent.ask is not None or intent.reference is not None):
        message = "kv_transfer_params describe one prompt; send a list of prompts one by one"
        raise InvalidRequest(message, param=kv_params.FIELD)
