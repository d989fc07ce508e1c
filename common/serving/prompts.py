"""Prompt token ids of a body: rendered and tokenised here, or P's own when they came with a KV reference (row 2).

Owns: what a prompt may look like, and keeping long texts off the event loop. Does not know: sampling, KV.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from common.errors import InvalidRequest
from common.openai.requests import ChatFields, CompletionFields, Message
from common.serving.served_model import ServedModel

OFF_LOOP_CHARS = 8192
"""Texts longer than this are rendered and tokenised in a thread (about a millisecond of work)."""

MAX_PROMPTS = 1024
_NOT_TEMPLATE_VARIABLES = frozenset(
    {
        *("messages", "conversation", "tools", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "self", "raise_exception", "strftime_now"),
    }
)
"""What rendering itself is given: fields of the body have their own place, the others are nobody's to set."""

REASONING_TAIL_TOKENS = 16


async def completion_prompts(fields: CompletionFields, model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Token ids of every prompt of a completion, in order.

    Raises:
        InvalidRequest: an empty or mixed list, an id outside the vocabulary.
    """
    texts_or_ids = _prompt_list(fields.prompt)
    if len(texts_or_ids) > MAX_PROMPTS:
        raise InvalidRequest(f"at most {MAX_PROMPTS} prompts in one request", param="prompt")
    texts = [prompt for prompt in texts_or_ids if isinstance(prompt, str)]
    encoded = iter(await encode_all(texts, model, add_special_tokens=fields.add_special_tokens))
    return tuple(next(encoded) if isinstance(prompt, str) else checked_ids(prompt, model) for prompt in texts_or_ids)


def count(fields: CompletionFields) -> int:
    """How many prompts a completion has.

    Raises:
        InvalidRequest: an empty or mixed list.
    """
    return len(_prompt_list(fields.prompt))


async def encode_all(texts: Sequence[str], model: ServedModel, *, add_special_tokens: bool) -> list[tuple[int, ...]]:
    """Token ids of each text.

    Raises:
        InvalidRequest: a text without a token.
    """

    def encode() -> list[tuple[int, ...]]:
        """All of them, in this thread."""
        return [tuple(model.tokenizer.encode(text, add_special_tokens=add_special_tokens)) for text in texts]

    is_long = sum(map(len, texts)) > OFF_LOOP_CHARS
    encoded = await asyncio.to_thread(encode) if is_long else encode()
    if not all(encoded):
        raise InvalidRequest("the prompt is empty", param="prompt")
    return encoded


async def chat_prompt(
    fields: ChatFields, model: ServedModel, template_extras: dict[str, object] | None = None
) -> tuple[int, ...]:
    """Token ids of the rendered conversation.

    Args:
        fields: the chat.
        model: whose template renders it.
        template_extras: further variables for templates that read constraints.

    Raises:
        InvalidRequest: the template refuses the messages.
    """
    messages = [_plain(message) for message in fields.messages]
    tools = [_without_none(msgspec.to_builtins(tool)) for tool in fields.tools or ()]
    extras: dict[str, object] = {**(fields.chat_template_kwargs or {}), **(template_extras or {})}
    if fields.documents is not None:
        extras["documents"] = fields.documents

    def render() -> tuple[int, ...]:
        """The conversation as text, and that as tokens, in this thread."""
        text = model.chat_template.render(
            messages,
            tools,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            **extras,
        )
        return tuple(model.tokenizer.encode(text, add_special_tokens=fields.add_special_tokens))

    is_long = sum(map(_num_chars, fields.messages)) > OFF_LOOP_CHARS
    token_ids = await asyncio.to_thread(render) if is_long else render()
    if not token_ids:
        raise InvalidRequest("the rendered prompt is empty", param="messages")
    return token_ids


def check_chat(fields: ChatFields) -> None:
    """What must hold of a chat whether or not it is rendered here.

    Raises:
        InvalidRequest: no messages, flags that contradict each other, or a template variable that is none.
    """
    taken = _NOT_TEMPLATE_VARIABLES.intersection(fields.chat_template_kwargs or ())
    if taken:
        name = min(taken)
        raise InvalidRequest(f"{name} cannot be set here", param=f"chat_template_kwargs.{name}")
    if not fields.messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    for index, message in enumerate(fields.messages):
        if not isinstance(message.content, tuple):
            continue
        for place, part in enumerate(message.content):
            if part.type != "text" or part.text is None:
                where = f"messages[{index}].content[{place}]"
                raise InvalidRequest(f"only text content is supported by this model, not {part.type!r}", param=where)
    if fields.continue_final_message and fields.add_generation_prompt:
        raise InvalidRequest("this needs add_generation_prompt: false", param="continue_final_message")


def ends_in_thinking(prompt_token_ids: Sequence[int], model: ServedModel) -> bool:
    """Whether the template has opened the model's thinking, so that the output begins inside it."""
    if model.reasoning is None:
        return False
    tail = model.tokenizer.decode(prompt_token_ids[-REASONING_TAIL_TOKENS:], skip_special_tokens=False)
    return tail.rstrip().endswith(model.reasoning.start)


def _prompt_list(prompt: str | tuple[str | int | tuple[int, ...], ...]) -> list[str | tuple[int, ...]]:
    """One entry per prompt: text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt must not be an empty list", param="prompt")
    numbers = [part for part in prompt if isinstance(part, int)]
    if len(numbers) == len(prompt):
        return [tuple(numbers)]
    if numbers:
        raise InvalidRequest("prompt mixes token ids with other prompts", param="prompt")
    return [part for part in prompt if not isinstance(part, int)]


def checked_ids(token_ids: tuple[int, ...], model: ServedModel, param: str = "prompt") -> tuple[int, ...]:
    """`token_ids`, when the model has a token for each.

    Raises:
        InvalidRequest: none at all, or one outside the vocabulary.
    """
    if not token_ids:
        raise InvalidRequest("a prompt of token ids must not be empty", param=param)
    vocab_size = model.tokenizer.vocab_size
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise InvalidRequest(f"token ids must be in [0, {vocab_size})", param=param)
    return token_ids


def _plain(message: Message) -> dict[str, object]:
    """The message as templates take it: absent fields absent, a content always there."""
    plain = _without_none(msgspec.to_builtins(message))
    plain.setdefault("content", "")
    if "reasoning" in plain:
        plain.setdefault("reasoning_content", plain["reasoning"])
    return plain


def _without_none(value: dict[str, object]) -> dict[str, object]:
    """A copy without null fields, at any depth of mappings we made from our own types."""
    return {
        key: _without_none(part) if isinstance(part, dict) and key == "function" else part
        for key, part in value.items()
        if part is not None
    }


def _num_chars(message: Message) -> int:
    if isinstance(message.content, str):
        return len(message.content)
    return sum(len(part.text or "") for part in message.content or ())
