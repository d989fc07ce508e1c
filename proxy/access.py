"""Who may come in: API keys of clients and operators, and how often each may ask.

Owns: key files (only hashes are stored), comparison, token buckets. Does not know: HTTP.

A key file has one key per line: `name sha256-of-the-key-in-hex [requests-per-minute]`; `#` starts a comment.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.clock import Clock
from common.errors import AuthenticationFailed, ConfigError, RateLimited

_LINE = re.compile(r"^(?P<name>\S+)\s+(?P<digest>[0-9a-fA-F]{64})(?:\s+(?P<per_minute>\d+))?$")


class TokenBucket:
    """Lets `per_minute` requests through, saving up at most ten seconds' worth (and at least one).

    Args:
        clock: source of time.
        per_minute: requests per minute in the long run.
    """

    def __init__(self, clock: Clock, per_minute: int) -> None:
        self._clock = clock
        self._per_s = per_minute / 60
        self._size = max(1.0, self._per_s * 10)
        self._tokens = self._size
        self._filled_s = clock.now_s()

    def take(self) -> float:
        """Take one; 0.0 if there was one, else the seconds until there is."""
        now_s = self._clock.now_s()
        self._tokens = min(self._size, self._tokens + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._per_s


@dataclass(frozen=True, slots=True)
class _Key:
    name: str
    digest: bytes
    bucket: TokenBucket | None


class KeyRing:
    """The keys of one file; without a file everyone may come in.

    Args:
        path: the key file, or None.
        clock: for the buckets.

    Raises:
        ConfigError: the file cannot be read, or a line of it.
    """

    def __init__(self, path: str | None, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._keys: tuple[_Key, ...] = ()
        self.reload()

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return self._path is None

    def reload(self) -> None:
        """Read the file again; on an error the old keys stay."""
        if self._path is None:
            return
        try:
            lines = Path(self._path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._path}: cannot be read as a key file") from error
        self._keys = tuple(
            self._parse(number, line) for number, line in enumerate(lines, start=1) if line.split("#")[0].strip()
        )

    def admit(self, headers: Mapping[str, str]) -> str | None:
        """The name of the key in `authorization` (header names in lower case); None where none is needed.

        Raises:
            AuthenticationFailed: no key, or none of ours.
            RateLimited: the key has used up its share.
        """
        if self._path is None:
            return None
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise AuthenticationFailed("an API key is needed: Authorization: Bearer <key>")
        digest = hashlib.sha256(secret.strip().encode("utf-8", "surrogateescape")).digest()
        # Every key is looked at, so that the time taken says nothing about which one was close.
        found = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        if not found:
            raise AuthenticationFailed("this API key is not known")
        wait_s = found[0].bucket.take() if found[0].bucket is not None else 0.0
        if wait_s > 0:
            raise RateLimited("this API key has used up its requests per minute", retry_after_s=wait_s)
        return found[0].name

    def _parse(self, number: int, line: str) -> _Key:
        found = _LINE.match(line.split("#")[0].strip())
        if found is None:
            raise ConfigError(f"{self._path}: line {number}: a key is `name sha256-in-hex [requests-per-minute]`")
        per_minute = found["per_minute"]
        bucket = TokenBucket(self._clock, int(per_minute)) if per_minute and int(per_minute) else None
        return _Key(found["name"], bytes.fromhex(found["digest"]), bucket)
