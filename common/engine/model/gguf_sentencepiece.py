"""A SentencePiece BPE vocabulary (pieces with scores) as a `tokenizers` model (pieces with merges).

Owns: deriving merges from scores, and the spelling of spaces and unknown bytes. Does not know files.
Source: Kudo and Richardson 2018; SentencePiece merges the neighbours whose union has the highest score.
"""

from collections.abc import Mapping

import tokenizers
from tokenizers import decoders, models, normalizers

SPACE = "\u2581"


def sentencepiece_tokenizer(
    vocab: Mapping[str, int], scores: Mapping[str, float], unknown: str | None, *, space_prefix: bool
) -> tokenizers.Tokenizer:
    """A tokenizer without special tokens.

    Args:
        vocab: every piece, byte pieces `<0x00>`.. included.
        scores: of the pieces that merging may make.
        unknown: the piece for what even bytes cannot spell.
        space_prefix: put a space before the text, and take it away when decoding.
    """
    model = models.BPE(
        vocab=dict(vocab), merges=merges_by_score(scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces] if space_prefix else [spaces])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)
    return tokenizer


def merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to make a piece from two others, the highest-scored piece first."""
    by_score = sorted((piece for piece in scores if len(piece) > 1), key=scores.__getitem__, reverse=True)
    return [
        (piece[:cut], piece[cut:])
        for piece in by_score
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
