"""`/tokenize` and `/detokenize`, as vLLM answers them.

Owns: the two routes. Does not know: generation.
"""

import msgspec
from aiohttp import web

from common.errors import InvalidRequest
from common.openai import requests
from common.openai.requests import AnswerFields, ChatFields, DetokenizeFields, TokenizeFields
from common.openai.responses import Detokenized, Tokenized
from common.serving import prompts
from common.serving.bodies import read_body
from common.serving.served_model import ServedModel
from common.serving.surface import Surface


class TokenizeRoutes:
    """The routes."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    async def tokenize(self, http: web.Request) -> web.Response:
        """Token ids of a prompt, or of a rendered conversation."""
        model = self._surface.require().model
        body = await read_body(http)
        model.require(requests.read(body, AnswerFields).model)
        fields = requests.read(body, TokenizeFields)
        token_ids = await _token_ids(fields, body, model)
        spelled = [model.tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]
        answer = Tokenized(
            count=len(token_ids),
            max_model_len=model.max_model_len_tokens,
            tokens=token_ids,
            token_strs=spelled if fields.return_token_strs else None,
        )
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def detokenize(self, http: web.Request) -> web.Response:
        """Text of token ids, special tokens included."""
        model = self._surface.require().model
        body = await read_body(http)
        model.require(requests.read(body, AnswerFields).model)
        tokens = requests.read(body, DetokenizeFields).tokens
        vocab_size = model.tokenizer.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise InvalidRequest(f"token ids must be in [0, {vocab_size})", param="tokens")
        answer = Detokenized(prompt=model.tokenizer.decode(tokens, skip_special_tokens=False))
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


async def _token_ids(fields: TokenizeFields, body: bytes, model: ServedModel) -> tuple[int, ...]:
    if fields.messages is not None:
        chat = requests.read(body, ChatFields)
        prompts.check_chat(chat)
        return await prompts.chat_prompt(chat, model)
    if fields.prompt is None:
        raise InvalidRequest("`prompt` or `messages` is missing", param="prompt")
    adds = True if fields.add_special_tokens is None else fields.add_special_tokens
    (token_ids,) = await prompts.encode_all([fields.prompt], model, add_special_tokens=adds)
    return token_ids
