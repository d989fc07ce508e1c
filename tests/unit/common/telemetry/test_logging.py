import logging
from collections.abc import Iterator

import pytest
import structlog

from common.telemetry.logging import configure_logging


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def fail_with(prompt: str) -> None:
    raise RuntimeError(f"broke after {len(prompt)} characters")


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.usefixtures("restored_logging")
def test_a_logged_exception_shows_its_frames_but_no_prompt(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("decode", json=as_json)
    secret = "the prompt of a customer"
    for logger in (structlog.get_logger(), logging.getLogger("third.party")):
        try:
            fail_with(secret)
        except RuntimeError:
            logger.exception("request.failed")
    text = capsys.readouterr().err
    assert text.count("fail_with") >= 2
    assert text.count("decode") >= 2
    assert secret not in text
