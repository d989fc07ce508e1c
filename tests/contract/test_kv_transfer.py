"""What `kv_transfer_params` and `/kv/*` do on P and on D."""

import msgspec
import pytest

from benchmarks.kv.pairs import ASK
from common.errors import EngineError, NotReady, QueueFull
from common.wire.kv_params import KvReference
from tests.support.serving_rig import REFERENCE, serving_rig

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "r", "schema": {"type": "object"}}}
BAD_SCHEMA = {"structured_outputs": {"grammar": "nonsense"}}


async def test_an_asked_prefill_makes_one_token_and_answers_with_the_reference():
    async with serving_rig(role="prefill") as rig:
        body = {"messages": MESSAGES, "max_tokens": 1, "stop": ["X"], "kv_transfer_params": ASK}
        answer = await rig.post(CHAT, body)
        assert answer.status == 200
        assert msgspec.convert(answer.json["kv_transfer_params"], KvReference) == REFERENCE
        assert answer.json["choices"][0]["finish_reason"] == "length"
        (request,) = rig.engine.requests
        assert request.hand_off
        assert (request.sampling.max_tokens, request.sampling.n, request.sampling.ignore_stops) == (1, 1, True)


async def test_an_asked_prefill_of_another_router_keeps_nothing_of_the_output_s_length():
    async with serving_rig(role="prefill") as rig:
        body = {"prompt": "hi", "max_tokens": 1, "min_tokens": 100, "n": 1, "kv_transfer_params": ASK}
        assert (await rig.post(COMPLETIONS, body)).status == 200
        assert rig.engine.requests[0].sampling.min_tokens == 0


@pytest.mark.parametrize(
    ("decode_fields", "param"),
    [
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_completion_tokens": 10**6, "max_tokens": 1}, "max_completion_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": True, "top_logprobs": 10**6}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ([1], "kv_transfer_params.decode_fields"),
    ],
)
async def test_prefill_refuses_before_it_computes_what_decode_would_have_to_refuse(decode_fields: object, param: str):
    async with serving_rig(role="prefill") as rig:
        ask = {**ASK, "decode_fields": decode_fields}
        body = {"messages": MESSAGES, "max_tokens": 1, "n": 1, "kv_transfer_params": ask}
        answer = await rig.post(CHAT, body)
        assert answer.status == 400
        assert answer.json["error"]["param"] == param
        assert rig.engine.requests == []


@pytest.mark.parametrize("logprobs", [10**6, "many", -3])
async def test_prefill_refuses_the_log_probabilities_of_a_completion_that_decode_would_refuse(logprobs: object):
    async with serving_rig(role="prefill") as rig:
        ask = {**ASK, "decode_fields": {"logprobs": logprobs}}
        answer = await rig.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 1, "kv_transfer_params": ask})
        assert (answer.status, answer.json["error"]["param"]) == (400, "logprobs")
        assert rig.engine.requests == []


async def test_a_prefill_reports_no_log_probabilities_of_a_token_nobody_sees():
    async with serving_rig(role="prefill") as rig:
        ask = {**ASK, "decode_fields": {"logprobs": True, "top_logprobs": 3, "stream": True}}
        assert (await rig.post(CHAT, {"messages": MESSAGES, "kv_transfer_params": ask})).status == 200
        assert rig.engine.requests[0].sampling.logprobs is None


async def test_a_prefill_that_passes_the_check_still_makes_one_token():
    async with serving_rig(role="prefill") as rig:
        ask = {**ASK, "decode_fields": {"max_tokens": 16, "min_tokens": 4, "n": 3}}
        body = {"messages": MESSAGES, "max_tokens": 1, "n": 1, "kv_transfer_params": ask}
        assert (await rig.post(CHAT, body)).status == 200
        sampling = rig.engine.requests[0].sampling
        assert (sampling.max_tokens, sampling.min_tokens, sampling.n) == (1, 0, 1)


async def test_a_marked_prefill_renders_the_constraint_without_enforcing_it():
    async with serving_rig(role="prefill", constraint_in_prompt=True) as rig:
        ask = {**ASK, "constraint": "ignore"}
        body = {"messages": MESSAGES, "response_format": SCHEMA, "kv_transfer_params": ask}
        await rig.post(CHAT, body)
        assert rig.engine.requests[0].constraint is None
        assert b"[format]json_schema" in bytes(rig.engine.requests[0].prompt_token_ids)


async def test_a_prefill_with_a_constraint_that_is_not_marked_enforces_it():
    async with serving_rig(role="prefill") as rig:
        await rig.post(CHAT, {"messages": MESSAGES, "response_format": SCHEMA, "kv_transfer_params": ASK})
        assert rig.engine.requests[0].constraint is not None


async def test_decode_continues_the_tokens_of_the_reference_and_never_renders():
    async with serving_rig() as rig:
        body = {"messages": MESSAGES, "max_tokens": 9, "kv_transfer_params": REFERENCE.to_json()}
        answer = await rig.post(CHAT, body)
        assert answer.status == 200
        (request,) = rig.engine.requests
        assert request.prompt_token_ids == REFERENCE.prompt_token_ids
        assert request.reference == REFERENCE
        assert answer.json["usage"]["prompt_tokens"] == 20
        assert rig.references.refused == []


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (CHAT, {"messages": MESSAGES, "temperature": -1}, 400),
        (CHAT, {"messages": MESSAGES, "temperature": "hot"}, 400),
        (CHAT, {"messages": []}, 400),
        (CHAT, {}, 400),
        (CHAT, {"messages": MESSAGES, "model": "other"}, 404),
        (CHAT, {"messages": MESSAGES, "max_tokens": 1000}, 400),
        (CHAT, {"messages": MESSAGES, "prompt_logprobs": 1}, 400),
        (CHAT, {"messages": MESSAGES, **BAD_SCHEMA}, 400),
        (COMPLETIONS, {"prompt": ["a", "b"]}, 400),
        (COMPLETIONS, {"prompt": "a", "suffix": "x"}, 400),
    ],
)
async def test_prefill_is_told_at_once_when_decode_refuses_the_request(path: str, fields: dict, status: int):
    async with serving_rig() as rig:
        answer = await rig.post(path, {**fields, "kv_transfer_params": REFERENCE.to_json()})
        assert answer.status == status
        assert rig.references.refused == [REFERENCE]
        assert rig.engine.requests == []


async def test_prefill_is_told_when_the_engine_s_queue_is_full():
    async with serving_rig() as rig:
        rig.engine.refuses = QueueFull("too many wait")
        body = {"messages": MESSAGES, "kv_transfer_params": REFERENCE.to_json()}
        answer = await rig.post(CHAT, body)
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        assert rig.references.refused == [REFERENCE]


async def test_an_engine_that_goes_away_leaves_the_kv_to_another_one():
    async with serving_rig() as rig:
        rig.engine.refuses = NotReady("the engine is not running")
        body = {"messages": MESSAGES, "kv_transfer_params": REFERENCE.to_json()}
        assert (await rig.post(CHAT, body)).status == 503
        assert rig.references.refused == []


async def test_what_the_engine_took_on_it_releases_by_itself():
    async with serving_rig() as rig:
        rig.engine.fail_after, rig.engine.error = 0, EngineError("it broke")
        body = {"messages": MESSAGES, "kv_transfer_params": REFERENCE.to_json()}
        assert (await rig.post(CHAT, body)).status == 500
        assert rig.references.refused == []


async def test_an_unsigned_reference_is_refused_and_nobody_is_told():
    async with serving_rig() as rig:
        forged = msgspec.structs.replace(REFERENCE, signature=None).to_json()
        answer = await rig.post(CHAT, {"messages": MESSAGES, "kv_transfer_params": forged})
        assert answer.status == 502
        assert answer.json["error"]["code"] == "kv_transfer_failed"
        assert rig.references.refused == []


async def test_a_reference_that_must_not_be_used_is_computed_here_where_policy_says_so():
    async with serving_rig() as rig:
        rig.references.admits = lambda _: None
        body = {"messages": MESSAGES, "kv_transfer_params": REFERENCE.to_json()}
        assert (await rig.post(CHAT, body)).status == 200
        assert rig.engine.requests[0].reference is None
        assert bytes(rig.engine.requests[0].prompt_token_ids) == b"[user]hi\n[assistant]"


async def test_a_reference_with_tokens_outside_the_vocabulary_is_refused():
    async with serving_rig() as rig:
        outside = msgspec.structs.replace(REFERENCE, prompt_token_ids=(1, 10**6)).to_json()
        answer = await rig.post(CHAT, {"messages": MESSAGES, "kv_transfer_params": outside})
        assert answer.status == 400
        assert answer.json["error"]["param"] == "kv_transfer_params"


@pytest.mark.parametrize("params", [{}, None, {"do_remote_prefill": False}])
async def test_parameters_that_ask_for_nothing_serve_the_request_whole(params: dict | None):
    async with serving_rig() as rig:
        answer = await rig.post(CHAT, {"messages": MESSAGES, "kv_transfer_params": params})
        assert answer.json["choices"][0]["message"]["content"] == "Hello"


@pytest.mark.parametrize(
    ("role", "params", "status"),
    [
        ("decode", ASK, 501),
        ("prefill", REFERENCE.to_json(), 501),
        ("decode", {"do_remote_prefill": True}, 400),
        ("decode", {"do_remote_prefill": True, "do_remote_decode": True}, 400),
        ("decode", "yes", 400),
        ("prefill", {"do_remote_decode": True, "constraint": "obey"}, 400),
    ],
)
async def test_parameters_an_engine_cannot_follow_are_refused_by_name(role: str, params: object, status: int):
    async with serving_rig(role=role) as rig:
        answer = await rig.post(CHAT, {"messages": MESSAGES, "kv_transfer_params": params})
        assert answer.status == status
        assert answer.json["error"]["param"].startswith("kv_transfer_params")


async def test_a_list_of_prompts_cannot_be_handed_over_at_once():
    async with serving_rig(role="prefill") as rig:
        answer = await rig.post(COMPLETIONS, {"prompt": ["a", "b"], "kv_transfer_params": ASK})
        assert (answer.status, answer.json["error"]["param"]) == (400, "kv_transfer_params")


async def test_handshakes_and_releases_reach_their_port_on_prefill_only():
    async with serving_rig(role="prefill") as prefill, serving_rig() as decode:
        assert (await prefill.get("/kv/handshake")).json == {"engine_id": "p-1"}
        refused = await prefill.post("/kv/handshake", {"engine_id": "d"})
        assert (refused.status, refused.json["cause"]) == (409, "incompatible")
        released = await prefill.post("/kv/release", {"lease_id": "lease-1", "request_id": "r-1"})
        assert released.json == {"released": True}
        assert (await prefill.post("/kv/release", {"lease_id": "gone"})).json == {"released": False}
        await prefill.post("/kv/release", {"request_id": "r-2"})
        assert (prefill.kv_control.released, prefill.kv_control.cancelled) == (["lease-1", "gone"], ["r-2"])
        assert (await prefill.post("/kv/release", {})).status == 400
        assert (await decode.get("/kv/handshake")).status == 404
