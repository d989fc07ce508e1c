"""Import a library without the heavy ones it only mentions.

Owns: the stand-ins. xgrammar 0.2.9 imports transformers and torch for type names and for converters that are not used
here; the real imports cost seconds, hold the GIL meanwhile, and 200 MB in the probe server, which has no tensors.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager


class _StandIn(types.ModuleType):
    """Any attribute is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = None
        self.__path__ = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": _ignore_arguments, "is_available": staticmethod(_never)})


def _ignore_arguments(self: object, *arguments: object, **options: object) -> None:
    """Whatever is constructed at import time is never used."""


def _never() -> bool:
    return False


@contextmanager
def standing_in(*names: str) -> Iterator[None]:
    """Let `names` that are not imported yet be empty modules, until the block ends."""
    added = [name for name in names if name not in sys.modules]
    for name in added:
        sys.modules[name] = _StandIn(name)
    try:
        yield
    finally:
        for name in added:
            sys.modules.pop(name, None)
