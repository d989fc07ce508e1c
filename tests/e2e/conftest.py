"""One trio of real processes for all tests of this folder that do not break it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.trio import MODEL, Trio, running_trio

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder run in one worker, one after the other: they share the trio."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("trio"))


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    if not MODEL.exists():
        pytest.skip(f"no default model at {MODEL}: run `make model`")
    with running_trio(tmp_path_factory.mktemp("trio")) as running:
        yield running
