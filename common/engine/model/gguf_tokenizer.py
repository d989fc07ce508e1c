"""The tokenizer inside a GGUF file, rebuilt as a Hugging Face `tokenizer.json`.

Owns: the vocabulary, merges, special tokens and the pre-tokenizer that `tokenizer.ggml.pre` names.
Source: the GGUF specification; the splitting rules of each name are those of the model's own `tokenizer.json`.
"""

from dataclasses import dataclass
from enum import IntEnum

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from common.engine.model.gguf_file import GgufFile
from common.engine.model.gguf_sentencepiece import sentencepiece_tokenizer
from common.engine.tokenizer import HfTokenizer
from common.errors import StartupError


class _TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_MERGED = frozenset({_TokenType.NORMAL, _TokenType.USER_DEFINED})


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How a family cuts text before merging.

    Attributes:
        pattern: words, kept as matched; None: the byte-level step's own GPT-2 pattern.
        single_digits: cut every digit off first.
        nfc: normalise to NFC first.
        ignore_merges: take a word that is a token as a whole, whatever the merges say.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = _Splitting()
_SMOLLM = _Splitting(single_digits=True)
_LLAMA3 = _Splitting(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_MARKS_AND_SPACES}", ignore_merges=True)
_QWEN2 = _Splitting(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_MARKS_AND_SPACES}", nfc=True)
_TEKKEN = _Splitting(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignore_merges=True,
)
_SPLITTING = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "tekken": _TEKKEN,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def read_tokenizer(file: GgufFile) -> HfTokenizer:
    """The file's tokenizer.

    Raises:
        StartupError: an unknown kind or pre-tokenizer (guessing would change token ids), or parts that do not fit.
    """
    kind = file.require("tokenizer.ggml.model", str)
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(kind)
    if build is None:
        raise StartupError(f"{file.path}: tokenizer model {kind} in GGUF is not supported; supported: gpt2, llama")
    try:
        tokenizer = build(file)
        _add_special_tokens(file, tokenizer)
        return HfTokenizer(tokenizer.to_str(), eos_token_ids(file))
    except StartupError:
        raise
    except Exception as error:  # the tokenizers package raises bare Exception
        raise StartupError(f"{file.path}: tokenizer: {error}") from error


def eos_token_ids(file: GgufFile) -> frozenset[int]:
    """Ids the file names as ends: of sequence, of turn, of message. Nothing is guessed from token text."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (file.get(f"tokenizer.ggml.{key}", int) for key in keys)
    return frozenset(token_id for token_id in ids if token_id is not None)


def special_tokens(file: GgufFile) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... to their text, for the chat template."""
    tokens = file.require("tokenizer.ggml.tokens", list[str])
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {f"{hf}_token": file.get(f"tokenizer.ggml.{ggml}_token_id", int) for hf, ggml in names.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None and token_id < len(tokens)}


def _byte_level(file: GgufFile) -> tokenizers.Tokenizer:
    """Byte-level BPE with the splitting rules that `tokenizer.ggml.pre` names."""
    pre = file.require("tokenizer.ggml.pre", str)
    splitting = _SPLITTING.get(pre)
    if splitting is None:
        raise StartupError(
            f"{file.path}: pre-tokenizer {pre} is not supported; supported: {', '.join(sorted(_SPLITTING))}"
        )
    merges = [_merge_pair(merge) for merge in file.require("tokenizer.ggml.merges", list[str])]
    vocab = {token: token_id for token_id, (token, kind) in enumerate(_tokens(file)) if kind is not _TokenType.UNUSED}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=splitting.ignore_merges))
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(splitting)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile) -> tokenizers.Tokenizer:
    """SentencePiece BPE (Llama 2, Mistral 7B)."""
    tokens = file.require("tokenizer.ggml.tokens", list[str])
    scores = file.require("tokenizer.ggml.scores", list[float])
    unknown = file.get("tokenizer.ggml.unknown_token_id", int)
    return sentencepiece_tokenizer(
        {token: token_id for token_id, token in enumerate(tokens)},
        {token: score for (token, kind), score in zip(_tokens(file), scores, strict=True) if kind in _MERGED},
        None if unknown is None else tokens[unknown],
        space_prefix=file.require("tokenizer.ggml.add_space_prefix", bool, True),
    )


def _tokens(file: GgufFile) -> list[tuple[str, _TokenType]]:
    """Every token's text and type, by id."""
    texts = file.require("tokenizer.ggml.tokens", list[str])
    types = file.require("tokenizer.ggml.token_type", list[int])
    return [(text, _TokenType(kind)) for text, kind in zip(texts, types, strict=True)]


def _add_special_tokens(file: GgufFile, tokenizer: tokenizers.Tokenizer) -> None:
    """Control tokens are special; user-defined ones are text that is never split; BOS goes in front where asked."""
    added = {_TokenType.CONTROL: True, _TokenType.USER_DEFINED: False}
    tokens = _tokens(file)
    tokenizer.add_tokens(
        [AddedToken(text, special=added[kind], normalized=False) for text, kind in tokens if kind in added]
    )
    bos_token_id = file.get("tokenizer.ggml.bos_token_id", int)
    is_sentencepiece = file.get("tokenizer.ggml.model", str) == "llama"
    steps: list[processors.PostProcessor] = [] if is_sentencepiece else [processors.ByteLevel(trim_offsets=False)]
    if bos_token_id is not None and file.require("tokenizer.ggml.add_bos_token", bool, is_sentencepiece):
        bos = tokens[bos_token_id][0]
        steps.append(processors.TemplateProcessing(single=f"{bos} $A", pair=None, special_tokens=[(bos, bos_token_id)]))
    if steps:
        tokenizer.post_processor = steps[0] if len(steps) == 1 else processors.Sequence(steps)


def _merge_pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(splitting: _Splitting) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    return pre_tokenizers.Sequence(steps)
