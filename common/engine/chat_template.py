"""Messages to prompt text by the model's own Jinja template, rendered in the environment Hugging Face defines.

Journey row 2 on an engine. Owns: the sandbox, the functions templates expect, message clean-up. Does not know the
OpenAI wire types (plain JSON values come in) or token ids. Tools for templates that know none: `tool_prompt`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from common.clock import Clock
from common.engine import tool_prompt
from common.errors import InvalidRequest, StartupError

Message = Mapping[str, object]
Tool = Mapping[str, object]

_RENDER_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"})


class ChatTemplate:
    """One model's template. Immutable; safe to use from several threads.

    Args:
        source: the Jinja text; None: the model has none, and every `render` is refused.
        special_tokens: `bos_token`, `eos_token`, ... as templates name them.
        clock: tells templates the date.

    Raises:
        StartupError: the template does not parse.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], clock: Clock) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._clock = clock
        self._environment = _environment(self._strftime_now)
        try:
            tree = self._environment.parse(source or "")
            self._template = self._environment.from_string(source or "")
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(f"chat template: line {error.lineno}: {error.message}") from error
        self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(tree)
        self._iterates_content = any(map(_iterates_content, tree.find_all(jinja2.nodes.For)))

    @property
    def fingerprint(self) -> str:
        """Equal for equal templates and special tokens; 16 hex digits."""
        canonical = json.dumps([self.source, self.special_tokens], sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> str:
        """The prompt of a conversation.

        Text parts are joined by newlines where the template wants a string. `arguments` of tool calls reach the
        template as objects. Tools for a template that never mentions `tools` go into the system message
        (`tool_prompt`).

        Args:
            messages: OpenAI chat messages as plain JSON values; not changed.
            tools: OpenAI tool definitions; None or empty: none.
            add_generation_prompt: end with the opening of the assistant's answer.
            continue_final_message: end inside the last message, for the model to go on with it.
            kwargs: further variables of this model's template (`chat_template_kwargs`). The caller keeps the two flags
                above out of them; the other names that matter are refused here.

        Raises:
            InvalidRequest: the template refuses these messages, or they are not what a template can take.
        """
        if self.source is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        reserved = _RESERVED.intersection(kwargs)
        if reserved:
            raise InvalidRequest(f"{min(reserved)} cannot be overridden", param="chat_template_kwargs")
        cleaned = [self._clean(index, message) for index, message in enumerate(messages)]
        if not self.knows_tools:
            cleaned = tool_prompt.fold_tools_into_messages(cleaned, tools or ())
        try:
            text = self._template.render(
                **{**self.special_tokens, **kwargs},
                messages=cleaned,
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
            )
        except _RENDER_FAULTS as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from error
        return _cut_after_final_message(text, cleaned) if continue_final_message else text

    def _clean(self, index: int, message: Message) -> dict[str, object]:
        """A copy of one message in the form templates take."""
        cleaned = dict(message)
        content = cleaned.get("content")
        if isinstance(content, list | tuple):
            parts = [_text_part(f"messages[{index}].content[{place}]", part) for place, part in enumerate(content)]
            cleaned["content"] = (
                [{"type": "text", "text": text} for text in parts] if self._iterates_content else "\n".join(parts)
            )
        calls = cleaned.get("tool_calls")
        if isinstance(calls, list | tuple):
            cleaned["tool_calls"] = [
                _with_parsed_arguments(f"messages[{index}].tool_calls[{place}]", call)
                for place, call in enumerate(calls)
            ]
        return cleaned

    def _strftime_now(self, layout: str) -> str:
        return datetime.fromtimestamp(self._clock.wall_s()).strftime(layout)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`, which marks text for training: here only its content."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it as an instance's

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(strftime_now: object) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment of `transformers` 5 `utils/chat_template_utils.py`: same switches, filters and functions."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes; Jinja's own filter would escape `<`, `>`, `&` and `'`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    """How templates refuse a conversation."""
    raise jinja2.TemplateError(message)


def _iterates_content(loop: jinja2.nodes.For) -> bool:
    """Whether a loop runs over `x.content` or `x['content']`, so that lists of parts may reach the template."""
    subject = loop.iter
    if isinstance(subject, jinja2.nodes.Getattr):
        return subject.attr == "content"
    if isinstance(subject, jinja2.nodes.Getitem):
        return isinstance(subject.arg, jinja2.nodes.Const) and subject.arg.value == "content"
    return isinstance(subject, jinja2.nodes.Name) and subject.name == "content"


def _text_part(place: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest("only text content is supported by this model", param=place)


def _with_parsed_arguments(place: str, call: object) -> object:
    """The call with `function.arguments` as an object: OpenAI sends a string, templates expect what it means."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidRequest("a tool call needs a function", param=place)
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments) if arguments else {}
        except ValueError as error:
            raise InvalidRequest(f"not JSON: {error}", param=f"{place}.function.arguments") from error
    return {**call, "function": function}


def _cut_after_final_message(text: str, messages: Sequence[Message]) -> str:
    """The rendered text up to the end of the last message's content."""
    content = messages[-1].get("content") if messages else None
    final = content.strip() if isinstance(content, str) else ""
    place = text.rfind(final) if final else -1
    if place < 0:
        raise InvalidRequest("the last message has no text to continue", param="messages")
    return text[: place + len(final)]
