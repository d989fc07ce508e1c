"""Which processes `pd-up` starts and where each can be asked whether it is ready.

Owns: reading the addresses out of the config file. Does not know: processes; the rest of the roles' settings (each
process checks its own).
"""

import sys
from dataclasses import dataclass

import msgspec

from common.config.loader import load_section
from common.config.tls import TlsConfig
from common.errors import ConfigError


class _Prefill(msgspec.Struct, frozen=True, kw_only=True):
    """Where P listens; the other keys of its section are its own business."""

    host: str = "127.0.0.1"
    port: int = 8100
    tls: TlsConfig = TlsConfig()


class _Decode(msgspec.Struct, frozen=True, kw_only=True):
    """Where D listens."""

    host: str = "127.0.0.1"
    port: int = 8200
    tls: TlsConfig = TlsConfig()


class _Proxy(msgspec.Struct, frozen=True, kw_only=True):
    """Where the proxy listens."""

    host: str = "127.0.0.1"
    port: int = 8000
    tls: TlsConfig = TlsConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPlan:
    """One process.

    Attributes:
        name: its role.
        command: program and arguments.
        url: base URL of its HTTP port.
    """

    name: str
    command: tuple[str, ...]
    url: str


def plan_children(config: str) -> tuple[ChildPlan, ...]:
    """The three processes, in the order in which they start; they stop in reverse.

    Raises:
        ConfigError: the file is wrong, or a process would answer over TLS only.
    """
    sections: tuple[tuple[str, type[_Decode | _Prefill | _Proxy]], ...] = (
        ("decode", _Decode),
        ("prefill", _Prefill),
        ("proxy", _Proxy),
    )
    children = []
    for name, section in sections:
        address = load_section(config, name, section)
        if address.tls.cert_file is not None:
            message = f"{config}: key `{name}.tls`: this command asks in plain HTTP; start the programs one by one"
            raise ConfigError(message)
        host = "127.0.0.1" if address.host in ("0.0.0.0", "::", "") else address.host
        command = (sys.executable, "-m", name, "--config", config)
        children.append(ChildPlan(name=name, command=command, url=f"http://{host}:{address.port}"))
    return tuple(children)
