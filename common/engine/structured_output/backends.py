"""Every backend by name, loaded when first needed: a library that no constraint asks for is never imported.

Owns: the table of loaders and the loaded ones. Does not know what they compile.
"""

import threading
from collections.abc import Callable, Mapping

from common.engine.structured_output.backend import Backend
from common.engine.structured_output.vocabulary import Vocabulary
from common.errors import ConfigError


def _load_guidance(vocabulary: Vocabulary, num_threads: int) -> Backend:
    from common.engine.structured_output.guidance_backend import GuidanceBackend

    return GuidanceBackend(vocabulary, num_threads)


def _load_xgrammar(vocabulary: Vocabulary, num_threads: int) -> Backend:
    from common.engine.structured_output.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(vocabulary, num_threads)


def _load_outlines(vocabulary: Vocabulary, num_threads: int) -> Backend:
    del num_threads  # its masks are look-ups
    from common.engine.structured_output.outlines_backend import OutlinesBackend

    return OutlinesBackend(vocabulary)


def _load_enforcer(vocabulary: Vocabulary, num_threads: int) -> Backend:
    del num_threads  # it is Python under the GIL
    from common.engine.structured_output.enforcer_backend import EnforcerBackend

    return EnforcerBackend(vocabulary)


_LOADERS: Mapping[str, Callable[[Vocabulary, int], Backend]] = {
    "guidance": _load_guidance,
    "xgrammar": _load_xgrammar,
    "outlines": _load_outlines,
    "lm-format-enforcer": _load_enforcer,
}


class BackendSet:
    """Backends over one vocabulary. Thread-safe.

    Args:
        vocabulary: the token table.
        num_threads: threads a backend may use to fill masks.
    """

    def __init__(self, vocabulary: Vocabulary, num_threads: int) -> None:
        self._vocabulary = vocabulary
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._loaded: dict[str, Backend] = {}

    def get(self, name: str) -> Backend:
        """The backend of that name; the first call imports its library.

        Raises:
            ConfigError: the library is not installed, or there is no such backend.
        """
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = self._load(name)
            return self._loaded[name]

    def _load(self, name: str) -> Backend:
        if name not in _LOADERS:
            raise ConfigError(f"grammar.backend: {name!r} is not one of auto, {', '.join(_LOADERS)}")
        try:
            return _LOADERS[name](self._vocabulary, self._num_threads)
        except ImportError as error:
            raise ConfigError(f"grammar.backend: {name} cannot be loaded: {error}") from error
