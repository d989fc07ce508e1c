"""One service for the whole folder: its probe server imports the grammar libraries once."""

from collections.abc import Iterator

import pytest

from common.engine.structured_output.service import LocalGrammarService
from tests.support.grammars import make_service


@pytest.fixture(scope="session")
def service() -> Iterator[LocalGrammarService]:
    service = make_service()
    yield service
    service.close()
