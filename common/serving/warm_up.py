"""One small request before an engine says it is ready: what is made on first use is made now.

Owns: that request. It also proves that the engine can generate. Does not know: what is slow the first time.
"""

import msgspec

from common.engine.request_state import FinishReason
from common.errors import ClientError, PDError, StartupError
from common.openai.requests import ChatFields, Message
from common.serving import prompts
from common.serving.generation import ChoiceDelta, generate
from common.serving.kv_intent import KvIntent
from common.serving.surface import Parts

_BODY = {"prompt": "The first request pays for what is made on first use.", "max_tokens": 2, "ignore_eos": True}


class _Last:
    """Remembers how the request ended."""

    def __init__(self) -> None:
        self.finish: FinishReason | None = None

    async def push(self, delta: ChoiceDelta) -> None:
        """Take one delta in."""
        self.finish = delta.finish


async def warm_up(parts: Parts) -> None:
    """Render, tokenise, generate two tokens.

    Raises:
        StartupError: the engine cannot generate.
    """
    intake, last = parts.intake, _Last()
    try:
        completion = await intake.completion(msgspec.json.encode(_BODY), KvIntent(), intake.begin())
        await generate(parts.engine, completion.job.requests, parts.model.tokenizer, last)
    except PDError as error:
        raise StartupError(f"the engine cannot generate: {error}") from error
    if last.finish is not FinishReason.LENGTH:
        raise StartupError(f"the engine cannot generate: its first request ended with {last.finish}")
    if parts.model.chat_template.source is not None:
        await _render(parts)


async def _render(parts: Parts) -> None:
    """Render the chat template once; a template that wants more than one user turn says so to clients, not here."""
    try:
        await prompts.chat_prompt(ChatFields(messages=(Message(role="user", content="Hello"),)), parts.model)
    except ClientError:
        return
