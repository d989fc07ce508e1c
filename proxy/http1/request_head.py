"""The head of a client's request, read strictly (RFC 9110, RFC 9112).

Owns: what is a request and what is none, and how long its body is. Strict because others may stand in front: where two
readers of the same bytes disagree about the end of a request, the second one can be made to see another request.
Does not know: sockets, what a path leads to.
"""

import re
from urllib.parse import unquote

import msgspec

from proxy.http1.body_parser import Malformed

MAX_HEAD_BYTES = 64 << 10
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TEXT = bytes(set(range(256)) - set(range(32)) - {127} | {ord("\t")})
_MAX_KNOWN_NAMES, _MAX_KNOWN_CHARACTERS = 1024, 64
_TARGET = re.compile(r"/.*|\*|[A-Za-z][A-Za-z0-9+.\-]*://.*")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_SINGLE = frozenset({"host", "content-length", "transfer-encoding"})


class RequestHead(msgspec.Struct):
    """What a request says before its body.

    Attributes:
        method: as sent.
        path: of the target, unquoted, without the query.
        headers: names in lower case; values of repeated names are joined by a comma; what is no UTF-8 is replaced.
        num_bytes: length of the body where the request tells it; 0 without a body.
        is_chunked: whether the body tells its own end.
        is_http10: the older version: no chunks in the answer.
        keeps_alive: whether the client wants to ask more on this connection.
    """

    method: str
    path: str
    headers: dict[str, str]
    num_bytes: int
    is_chunked: bool
    is_http10: bool
    keeps_alive: bool


class HeadReader:
    """Reads heads; remembers the spelling of header names, which hardly ever changes."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def read(self, head: bytes) -> RequestHead:
        """The head without its blank line.

        Raises:
            Malformed: it is none, or one that could be read in two ways.
        """
        text = head.decode("utf-8", "replace")
        request_line, *lines = text.split("\r\n")
        if head.translate(None, _TEXT) != b"\r\n" * len(lines):
            raise Malformed("control characters in the head")
        method, path, is_http10 = _request_line(request_line)
        headers: dict[str, str] = {}
        names = self._names
        for line in lines:
            spelled, colon, value = line.partition(":")
            name = names.get(spelled) or self._learn(spelled)
            if not colon:
                raise Malformed("a header line without a colon")
            value = value.strip(" \t")
            if name in headers:
                if name in _SINGLE:
                    raise Malformed(f"the header {name} stands there twice")
                value = f"{headers[name]}, {value}"
            headers[name] = value
        if "host" not in headers and not is_http10:
            raise Malformed("the header host is missing")
        num_bytes, is_chunked = _body_length(headers, is_http10=is_http10)
        return RequestHead(method, path, headers, num_bytes, is_chunked, is_http10, _keeps_alive(headers, is_http10))

    def _learn(self, spelled: str) -> str:
        if _TOKEN.fullmatch(spelled) is None:
            raise Malformed("a header line without a proper name")
        name = spelled.lower()
        if len(self._names) < _MAX_KNOWN_NAMES and len(spelled) <= _MAX_KNOWN_CHARACTERS:
            self._names[spelled] = name
        return name


def _request_line(line: str) -> tuple[str, str, bool]:
    """Method, path, whether the version is 1.0."""
    parts = line.split(" ")
    if len(parts) != 3 or not line.isascii() or "\t" in line:
        raise Malformed("not a request line")
    method, target, version = parts
    if _TARGET.fullmatch(target) is None:
        raise Malformed("not a target")
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise Malformed("not HTTP/1.1")
    if method not in _METHODS and _TOKEN.fullmatch(method) is None:
        raise Malformed("not a method")
    return method, _path_of(target), version == "HTTP/1.0"


def _path_of(target: str) -> str:
    if target[0] not in "/*":
        # The form that proxies are asked in: the authority says nothing that the connection does not.
        _, _, rest = target.partition("://")
        target = "/" + rest.partition("/")[2]
    if "?" in target or "#" in target:
        target = target.partition("#")[0].partition("?")[0]
    return unquote(target) if "%" in target else target


def _body_length(headers: dict[str, str], *, is_http10: bool) -> tuple[int, bool]:
    length, coding = headers.get("content-length"), headers.get("transfer-encoding")
    if coding is not None:
        if length is not None or is_http10 or coding.lower() != "chunked":
            raise Malformed("the length of the body is not clear")
        return 0, True
    if length is None:
        return 0, False
    if not length.isascii() or not length.isdigit() or len(length) > 18:
        raise Malformed("content-length is no length")
    return int(length), False


def _keeps_alive(headers: dict[str, str], is_http10: bool) -> bool:
    connection = headers.get("connection")
    if connection is None:
        return not is_http10
    wishes = {wish.strip() for wish in connection.lower().split(",")}
    return "close" not in wishes and (not is_http10 or "keep-alive" in wishes)
