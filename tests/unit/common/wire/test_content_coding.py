"""Compressed bodies: what is undone, what is refused, what it may cost."""

import gzip
import random
import zlib

import pytest

from common.errors import InvalidRequest, PayloadTooLarge
from common.wire.content_coding import decoded

TEXT = b'{"prompt": "' + random.Random(1).randbytes(2_000).hex().encode() + b'"}'
MOST_BYTES = len(TEXT)


def raw_deflate(data: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflater.compress(data) + deflater.flush()


def test_a_body_that_is_not_compressed_stays_as_it_is() -> None:
    assert decoded(TEXT, "", 1) == decoded(TEXT, "Identity", 1) == TEXT


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(TEXT)),
        ("X-GZIP", gzip.compress(TEXT)),
        ("deflate", zlib.compress(TEXT)),
        ("deflate", raw_deflate(TEXT)),
    ],
)
def test_each_encoding_is_undone(encoding: str, body: bytes) -> None:
    assert decoded(body, encoding, MOST_BYTES) == TEXT


@pytest.mark.parametrize("num_bytes", [1, 7, 500, 3_999])
def test_gzip_members_of_any_size_behind_one_another_are_one_body(num_bytes: int) -> None:
    members = [gzip.compress(TEXT[place : place + num_bytes]) for place in range(0, len(TEXT), num_bytes)]
    assert decoded(b"".join([*members, gzip.compress(b"")]), "gzip", MOST_BYTES) == TEXT


@pytest.mark.parametrize("num_members", [1, 2, 40])
def test_the_limit_holds_for_all_members_together(num_members: int) -> None:
    size = len(TEXT) // num_members + 1
    body = b"".join(gzip.compress(TEXT[place : place + size]) for place in range(0, len(TEXT), size))
    assert decoded(body, "gzip", MOST_BYTES) == TEXT
    with pytest.raises(PayloadTooLarge):
        decoded(body, "gzip", MOST_BYTES - 1)


@pytest.mark.parametrize("rest", [b"\0", b"x", b"\x1f", TEXT, gzip.compress(TEXT)[:-1]])
def test_what_stands_behind_a_member_and_is_none_is_refused(rest: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decoded(gzip.compress(TEXT) + rest, "gzip", 10 * MOST_BYTES)


@pytest.mark.parametrize("body", [b"", TEXT, gzip.compress(TEXT)[:-1], gzip.compress(TEXT)[:-8] + b"12345678"])
def test_a_body_that_is_cut_off_or_damaged_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decoded(body, "gzip", MOST_BYTES)


def test_deflate_is_one_stream() -> None:
    with pytest.raises(InvalidRequest):
        decoded(zlib.compress(TEXT) * 2, "deflate", 2 * MOST_BYTES)


def test_another_encoding_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="gzip or deflate"):
        decoded(TEXT, "br", MOST_BYTES)


def test_members_that_hold_nothing_are_not_counted_for_ever() -> None:
    with pytest.raises(InvalidRequest):
        decoded(gzip.compress(b"") * 20_000, "gzip", MOST_BYTES)
