"""Any body becomes a job or a refusal of the client's; nothing a client writes is our failure."""

import asyncio

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ClientError, TransferError
from common.openai.requests import AnswerFields, ChatFields, CompletionFields, SamplingFields
from common.serving.job import ChatJob, CompletionJob
from tests.support.serving_rig import REFERENCE, scripted

MADE = scripted()
CONSTRAINT_FIELDS = ("response_format", "structured_outputs", "tool_choice", "guided_json", "kv_transfer_params")
NAMES = sorted(
    {
        *CONSTRAINT_FIELDS,
        *(
            name
            for fields in (AnswerFields, SamplingFields, CompletionFields, ChatFields)
            for name in fields.__struct_encode_fields__
        ),
    }
)
WORDS = st.sampled_from(
    [
        "",
        "hi",
        "m",
        "user",
        "text",
        "type",
        "function",
        "name",
        "json",
        "required",
        "json_schema",
        "schema",
        "object",
        "a+",
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS
    | st.text(st.characters(codec="utf-8"), max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6)
SENSIBLE = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}


def taken(path: str, body: dict) -> CompletionJob | ChatJob | None:
    """The job, or None for a refusal."""
    data, intake = msgspec.json.encode(body), MADE.parts.intake
    try:
        intent = MADE.parts.kv.read(data)
        make = intake.completion if path == "completion" else intake.chat
        return asyncio.run(make(data, intent, intake.begin()))
    except (ClientError, TransferError):
        return None


@settings(max_examples=150, deadline=None)
@given(body=BODIES, path=st.sampled_from(["completion", "chat"]), sensible=st.booleans())
def test_a_body_is_taken_or_refused_and_never_our_failure(body: dict, path: str, sensible: bool):
    job = taken(path, {**SENSIBLE, **body} if sensible else body)
    if job is not None:
        for request in job.job.requests:
            assert request.prompt_token_ids
            assert 1 <= request.sampling.max_tokens <= 256 - len(request.prompt_token_ids)


@settings(max_examples=100, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from(sorted(REFERENCE.to_json())), VALUES, max_size=3),
    dropped=st.sets(st.sampled_from(sorted(REFERENCE.to_json())), max_size=2),
)
def test_a_mangled_reference_is_refused_or_read_as_the_same_type(changes: dict, dropped: set[str]):
    params = {key: value for key, value in {**REFERENCE.to_json(), **changes}.items() if key not in dropped}
    job = taken("completion", {"prompt": "hi", "kv_transfer_params": params})
    if job is not None and job.job.requests[0].reference is not None:
        vocab_size = MADE.parts.model.tokenizer.vocab_size
        assert all(0 <= token < vocab_size for token in job.job.requests[0].prompt_token_ids)


def test_a_sensible_body_is_taken_on_both_endpoints():
    assert taken("completion", SENSIBLE) is not None
    assert taken("chat", SENSIBLE) is not None
