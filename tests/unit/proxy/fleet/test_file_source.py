from pathlib import Path

import pytest

from common.clock import ManualClock
from common.errors import ConfigError
from proxy.config import FleetConfig
from proxy.fleet.file_source import FileSource, parse
from proxy.fleet.membership import Fleet, Source
from proxy.fleet.worker import Role


def urls(fleet: Fleet, role: Role) -> set[str]:
    return {worker.url for worker in fleet.of(role)}


def test_the_fleet_follows_the_file_and_keeps_what_others_brought(tmp_path: Path) -> None:
    fleet = Fleet(FleetConfig(decode=("http://static:1",)), ManualClock())
    fleet.add(Role.DECODE, "http://admin:1", Source.ADMIN)
    path = tmp_path / "fleet.json"
    source = FileSource(str(path), fleet, 1.0)
    source.look()
    path.write_text('{"prefill": ["http://p:1"], "decode": ["http://d:1", "http://d:2/"]}')
    source.look()
    assert urls(fleet, Role.PREFILL) == {"http://p:1"}
    assert urls(fleet, Role.DECODE) == {"http://static:1", "http://admin:1", "http://d:1", "http://d:2"}
    kept = fleet.find(Role.DECODE, "http://d:2")
    path.write_text('{"decode": ["http://d:2"]}')
    source.look()
    assert urls(fleet, Role.PREFILL) == set()
    assert urls(fleet, Role.DECODE) == {"http://static:1", "http://admin:1", "http://d:2"}
    assert fleet.find(Role.DECODE, "http://d:2") is kept


def test_a_file_that_makes_no_sense_changes_nothing(tmp_path: Path) -> None:
    fleet = Fleet(FleetConfig(), ManualClock())
    path = tmp_path / "fleet.json"
    source = FileSource(str(path), fleet, 1.0)
    for text in ('{"decode": ["http://d:1"]}', "{", '{"decode": ["d:1"]}'):
        path.write_text(text)
        source.look()
    path.unlink()
    source.look()
    assert urls(fleet, Role.DECODE) == {"http://d:1"}


@pytest.mark.parametrize("text", ["[]", '{"prefil": []}', '{"prefill": [1]}', '{"prefill": ["ftp://x"]}'])
def test_what_the_file_may_say_is_checked(text: str) -> None:
    with pytest.raises(ConfigError, match=r"fleet\.json"):
        parse(text.encode(), "fleet.json")
