"""One trio of real processes for all tests of this folder that do not break it."""

from collections.abc import Iterator

import pytest

from tests.support.trio import MODEL, Trio, running_trio


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    if not MODEL.exists():
        pytest.skip(f"no default model at {MODEL}: run `make model`")
    with running_trio(tmp_path_factory.mktemp("trio")) as running:
        yield running
