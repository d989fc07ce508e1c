import json

import pytest

from common import errors
from common.openai.error_body import error_answer


def every_class(root: type[errors.PDError]) -> list[type[errors.PDError]]:
    children = [child for child in root.__subclasses__() if child.__module__ == root.__module__]
    return [root, *(leaf for child in children for leaf in every_class(child))]


@pytest.mark.parametrize("cls", every_class(errors.PDError))
def test_every_class_of_the_tree_has_an_openai_body(cls: type[errors.PDError]) -> None:
    answer = error_answer(cls("it broke"))
    error = json.loads(answer.body)["error"]
    assert 400 <= answer.status < 600
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("exc", "status", "code"),
    [
        (errors.ContextLengthExceeded("too long"), 400, "context_length_exceeded"),
        (errors.ConstraintRejected("no"), 400, "constraint_rejected"),
        (errors.AuthenticationFailed("no"), 401, "invalid_api_key"),
        (errors.NotFound("no"), 404, "not_found"),
        (errors.MethodNotAllowed("no"), 405, "method_not_allowed"),
        (errors.PayloadTooLarge("no"), 413, "payload_too_large"),
        (errors.RateLimited("no"), 429, "rate_limit_exceeded"),
        (errors.NotReady("no"), 503, "not_ready"),
        (errors.UpstreamUnreachable("no"), 502, "upstream_unreachable"),
        (errors.UpstreamTimeout("no"), 504, "upstream_timeout"),
        (errors.IncompatiblePeer("block_size differs"), 502, "kv_transfer_failed"),
        (errors.NoTokenAllowed("masked"), 500, "engine_failed"),
    ],
)
def test_the_closest_class_decides(exc: errors.PDError, status: int, code: str) -> None:
    answer = error_answer(exc)
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (status, code)


def test_a_client_error_names_its_field_and_keeps_its_text() -> None:
    error = json.loads(error_answer(errors.InvalidRequest("must be >= 0", param="temperature")).body)["error"]
    assert (error["message"], error["param"]) == ("must be >= 0", "temperature")


@pytest.mark.parametrize("exc", [KeyError("secret"), errors.Bug("secret"), errors.IllegalTransition("secret")])
def test_unknown_exceptions_show_nothing_of_their_inside(exc: BaseException) -> None:
    answer = error_answer(exc)
    assert answer.status == 500
    assert b"secret" not in answer.body


def test_overload_says_when_to_try_again() -> None:
    assert error_answer(errors.NotReady("starting", retry_after_s=3)).headers["Retry-After"] == "3"
    assert error_answer(errors.QueueFull("full", retry_after_s=0.1)).headers["Retry-After"] == "1"
