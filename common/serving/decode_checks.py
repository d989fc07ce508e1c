"""What P checks on D's behalf before it computes a prompt: fields of the decode leg that the prefill leg lacks.

Journey row 3b. Owns: which of them could still be refused, and that D would say the same. Sampling fields are not
here: they are read in place of the leg's own (`intake`). Does not know: HTTP, what the proxy changes.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from common.errors import InvalidRequest
from common.openai import requests
from common.openai.requests import AnswerFields
from common.serving.sampling_fields import SamplingReader


class CompletionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a completion reports of its tokens."""

    logprobs: int | None = None


class ChatReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat reports of its tokens."""

    logprobs: bool | None = None
    top_logprobs: int | None = None


def check_completion(decode_fields: Mapping[str, Any], sampling: SamplingReader) -> None:
    """Refuse what D would refuse.

    Raises:
        InvalidRequest: a mistyped field, or more log probabilities than this engine reports.
    """
    check_answer(requests.convert(decode_fields, AnswerFields))
    sampling.check_logprobs(requests.convert(decode_fields, CompletionReport).logprobs)


def check_chat(decode_fields: Mapping[str, Any], sampling: SamplingReader) -> None:
    """Refuse what D would refuse.

    Raises:
        InvalidRequest: as `check_completion`.
    """
    check_answer(requests.convert(decode_fields, AnswerFields))
    report = requests.convert(decode_fields, ChatReport)
    sampling.check_logprobs(chat_logprobs(report.logprobs, report.top_logprobs))


def check_answer(answer: AnswerFields) -> None:
    """Options of a stream need one.

    Raises:
        InvalidRequest: they are there without it.
    """
    if answer.stream_options is not None and not answer.stream:
        raise InvalidRequest("stream_options need stream: true", param="stream_options")


def chat_logprobs(logprobs: bool | None, top_logprobs: int | None) -> int | None:
    """How many alternatives a chat reports, 0 for the chosen token alone; None: nothing.

    Raises:
        InvalidRequest: alternatives without log probabilities.
    """
    if top_logprobs and not logprobs:
        raise InvalidRequest("top_logprobs need logprobs: true", param="top_logprobs")
    return (top_logprobs or 0) if logprobs else None
