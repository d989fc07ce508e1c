"""Token log probabilities in OpenAI's two forms and vLLM's `prompt_logprobs` (journey row 9).

Owns: how a token is spelled in them. Does not know: how they were computed.
"""

from collections.abc import Sequence

from common.engine.outputs import PositionLogprobs, TokenLogprob
from common.engine.tokenizer import Tokenizer
from common.openai.responses import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
    finite,
)


class TokenSpelling:
    """How one token is written in logprobs.

    Args:
        tokenizer: the model's.
        as_ids: vLLM's `return_tokens_as_token_ids`: `token_id:17` instead of text.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """The token alone, special tokens included; bytes that are no character alone become U+FFFD."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def raw(self, token_id: int) -> list[int]:
        """Its bytes."""
        return list(self._tokenizer.token_bytes(token_id) or self.text(token_id).encode())


class CompletionLogprobsWriter:
    """Completion logprobs of one choice; remembers where its text has got to."""

    def __init__(self, spelling: TokenSpelling) -> None:
        self._spelling = spelling
        self._offset = 0

    def write(self, positions: Sequence[PositionLogprobs]) -> CompletionLogprobs:
        """The next output positions."""
        return self._write(list(positions), [entry.chosen.token_id for entry in positions])

    def write_prompt(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> CompletionLogprobs:
        """The prompt's positions, for `echo`; a position without a probability (the first) has nulls."""
        return self._write(list(positions), token_ids)

    def _write(self, positions: list[PositionLogprobs | None], token_ids: Sequence[int]) -> CompletionLogprobs:
        result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token_id, position in zip(token_ids, positions, strict=True):
            text = self._spelling.text(token_id)
            result.text_offset.append(self._offset)
            result.tokens.append(text)
            result.token_logprobs.append(None if position is None else finite(position.chosen.logprob))
            result.top_logprobs.append(None if position is None else self._alternatives(position))
            self._offset += len(text)
        return result

    def _alternatives(self, position: PositionLogprobs) -> dict[str, float]:
        """The chosen token and the best ones; tokens that look alike keep the better probability."""
        result: dict[str, float] = {}
        for entry in (*position.top, position.chosen):
            result.setdefault(self._spelling.text(entry.token_id), finite(entry.logprob))
        return result


def chat_logprobs(positions: Sequence[PositionLogprobs], spelling: TokenSpelling) -> ChatLogprobs:
    """Chat logprobs of some output positions."""

    def alternative(entry: TokenLogprob) -> TopLogprob:
        """A token beside the chosen one."""
        token = spelling.text(entry.token_id)
        return TopLogprob(token=token, logprob=finite(entry.logprob), bytes=spelling.raw(entry.token_id))

    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=spelling.text(position.chosen.token_id),
                logprob=finite(position.chosen.logprob),
                bytes=spelling.raw(position.chosen.token_id),
                top_logprobs=[alternative(entry) for entry in position.top],
            )
            for position in positions
        ]
    )


def prompt_logprobs(positions: Sequence[PositionLogprobs | None], spelling: TokenSpelling) -> PromptLogprobs:
    """Prompt logprobs as vLLM writes them: per position, token id → probability, rank and text."""

    def entry(token: TokenLogprob) -> PromptLogprob:
        """What is said of one token."""
        return PromptLogprob(
            logprob=finite(token.logprob), rank=token.rank, decoded_token=spelling.text(token.token_id)
        )

    return [
        None if position is None else {str(token.token_id): entry(token) for token in (position.chosen, *position.top)}
        for position in positions
    ]
