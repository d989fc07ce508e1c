"""lm-format-enforcer behind the backend port: a character-level parser in Python, walked over the vocabulary's trie.

Owns: the only import of `lmformatenforcer`. Nothing to compile, but every mask is Python work under the GIL: for people
who need this library's behaviour, not for speed. Takes regexes, choices and simple JSON schemas (`exactness`).
"""

import json
from collections.abc import Sequence

import lmformatenforcer
import numpy as np
from lmformatenforcer.characterlevelparser import CharacterLevelParser, CharacterLevelParserConfig
from lmformatenforcer.tokenenforcer import TokenEnforcer, TokenEnforcerTokenizerData

from common.engine.structured_output.backend import FillRow
from common.engine.structured_output.json_rules import MAX_WHITESPACE
from common.engine.structured_output.patterns import choice_pattern
from common.engine.structured_output.vocabulary import Int32Array, Vocabulary
from common.errors import ConstraintRejected
from common.wire.constraint import Constraint, ConstraintKind

_MATCHER_BYTES = 64 << 10
_LONGEST_ARRAY = 1 << 20
"""The library stops arrays at 20 items unless told; nobody asked for that."""


class EnforcerMatcher:
    """The tokens so far and the enforcer that knows what may follow them."""

    def __init__(self, enforcer: TokenEnforcer, end_token_id: int) -> None:
        self._enforcer = enforcer
        self._end_token_id = end_token_id
        self._token_ids: list[int] = []

    def allowed(self) -> list[int]:
        """Ids that may follow."""
        return list(self._enforcer.get_allowed_tokens(self._token_ids).allowed_tokens)

    def consume(self, token_id: int) -> bool:
        """Advance by one token."""
        if token_id == self._end_token_id or token_id not in self.allowed():
            return False
        self._token_ids = [*self._token_ids, token_id]
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        """Leading tokens that would be accepted."""
        count = 0
        while count < len(token_ids) and self.consume(token_ids[count]):
            count += 1
        self.rollback(count)
        return count

    def rollback(self, num_tokens: int) -> None:
        """Undo tokens."""
        self._token_ids = self._token_ids[: len(self._token_ids) - num_tokens]

    def forced(self) -> Sequence[int]:
        """The library cannot say."""
        return ()

    def can_end(self) -> bool:
        """Whether the text is complete."""
        return self._end_token_id in self.allowed()


class EnforcerGrammar:
    """An immutable parser at its beginning."""

    def __init__(self, parser: CharacterLevelParser, tokens: TokenEnforcerTokenizerData, end_token_id: int) -> None:
        self._parser = parser
        self._tokens = tokens
        self._end_token_id = end_token_id

    @property
    def num_bytes(self) -> int:
        """A guess: the parser is a handful of objects."""
        return _MATCHER_BYTES

    def start(self) -> EnforcerMatcher:
        """An enforcer of its own: it remembers every prefix it saw, and that must end with the request."""
        config = self._parser.config
        enforcer = TokenEnforcer(self._tokens, self._parser)
        # The enforcer replaces the configuration by one that only knows its alphabet.
        config.alphabet = self._tokens.tokenizer_alphabet
        self._parser.config = config
        return EnforcerMatcher(enforcer, self._end_token_id)


class EnforcerBackend:
    """lm-format-enforcer over one vocabulary.

    Args:
        vocabulary: the token table; tokens that are not whole UTF-8 characters are never allowed here.
    """

    name = "lm-format-enforcer"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._end_token_id = vocabulary.end_token_id
        self._tokens = TokenEnforcerTokenizerData(
            _texts(vocabulary), lambda _: "", vocabulary.end_token_id, False, vocabulary.size
        )

    def compile(self, constraint: Constraint) -> EnforcerGrammar:
        """Make the parser.

        Raises:
            ConstraintRejected: not a kind it has, or refused by the library.
        """
        try:
            parser = self._parser(constraint)
            grammar = EnforcerGrammar(parser, self._tokens, self._end_token_id)
            allowed = grammar.start().allowed()
        except ConstraintRejected:
            raise
        except Exception as error:  # the library throws what its parsers happen to throw
            raise ConstraintRejected(" ".join(str(error).split())[:400], constraint.field) from error
        if not allowed:
            raise ConstraintRejected("no output can satisfy this constraint", constraint.field)
        return grammar

    def _parser(self, constraint: Constraint) -> CharacterLevelParser:
        kind, value = constraint.kind, constraint.value
        config = CharacterLevelParserConfig(
            max_consecutive_whitespaces=MAX_WHITESPACE if constraint.any_whitespace else 0,
            force_json_field_order=True,
            max_json_array_length=_LONGEST_ARRAY,
        )
        if kind is ConstraintKind.REGEX:
            return lmformatenforcer.RegexParser(value, config)
        if kind is ConstraintKind.CHOICE:
            return lmformatenforcer.RegexParser(choice_pattern(value), config)
        if kind is ConstraintKind.JSON_SCHEMA and constraint.whitespace_pattern is None:
            return lmformatenforcer.JsonSchemaParser(json.loads(value), config)
        raise ConstraintRejected(f"the lm-format-enforcer backend does not take {kind.value}", constraint.field)

    def fill(self, rows: Sequence[FillRow], bitmask: Int32Array) -> None:
        """Compute masks one after the other, under the GIL."""
        for row in rows:
            if not isinstance(row.matcher, EnforcerMatcher):
                raise TypeError(f"not a matcher of this backend: {type(row.matcher).__name__}")
            ids = np.asarray(row.matcher.allowed(), dtype=np.int64)
            words = np.zeros(bitmask.shape[1], dtype=np.uint32)
            np.bitwise_or.at(words, ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))
            bitmask[row.row] = words.view(np.int32)


def _texts(vocabulary: Vocabulary) -> list[tuple[int, str, bool]]:
    """Id, text, and whether the text stands alone (it always does: incomplete characters are left out)."""
    texts: list[tuple[int, str, bool]] = []
    for token_id, token in enumerate(vocabulary.token_bytes):
        if token and token_id not in vocabulary.special_token_ids:
            try:
                texts.append((token_id, token.decode(), True))
            except UnicodeDecodeError:
                continue
    return texts
