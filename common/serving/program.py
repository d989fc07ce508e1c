"""The command line of an engine: `--config FILE`, and what the last line on stderr says when it cannot start.

Owns: exit codes: config 2, anything else that stops the start 1. Light on purpose: a wrong config is answered before
torch is imported. Does not know: what is served.
"""

import argparse
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import uvloop

from common.errors import ConfigError, StartupError

SettingsT = TypeVar("SettingsT")


def run(
    program: str,
    argv: Sequence[str] | None,
    read: Callable[[str], SettingsT],
    serve: Callable[[SettingsT], Coroutine[Any, Any, None]],
) -> int:
    """Run one engine process; returns its exit code.

    Args:
        program: its name on the command line.
        argv: arguments; None takes the process's own.
        read: checked settings from the path of the config file. Raises `ConfigError`.
        serve: serves until a signal. Raises `StartupError`.
    """
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--config", required=True, help="YAML file with the sections engine, prefill, decode")
    options = parser.parse_args(argv)
    try:
        uvloop.run(serve(read(options.config)))
    except ConfigError as error:
        sys.stderr.write(f"{program}: {error}\n")
        return 2
    except StartupError as error:
        sys.stderr.write(f"{program}: {error}\n")
        return 1
    except KeyboardInterrupt:  # before signals were watched
        return 130
    return 0
