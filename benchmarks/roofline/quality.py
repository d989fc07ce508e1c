"""What a weight dtype costs in quality: perplexity of the fixed text, and distance from float32 token by token.

Owns: the figures. The text is ours (`text.TEXT`), so no model has seen it.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.roofline.cells import BLOCK_SIZE
from benchmarks.roofline.text import TEXT
from common.engine.model.cpu_kernels.decoder import CpuDecoder
from common.engine.model.forward import ForwardBatch
from common.engine.model.loader import load_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One dtype on the text.

    Attributes:
        perplexity: exp of the mean negative log-likelihood per token.
        divergence: mean KL divergence from float32's next-token distribution, nats.
        agreement: share of positions whose most likely token is float32's.
        is_identical: whether all logits are float32's bit for bit.
    """

    dtype: str
    weight_bytes: int
    perplexity: float
    divergence: float
    agreement: float
    is_identical: bool

    def as_row(self) -> dict[str, str | float]:
        """For JSON."""
        return asdict(self)


def measure_quality(path: Path, dtypes: list[str], num_threads: int) -> list[Quality]:
    """Each dtype on the text; float32 is measured first, shown or not."""
    reference, _, _ = _logits(path, "float32", num_threads)
    return [_compare(path, dtype, reference, num_threads) for dtype in dtypes]


def _compare(path: Path, dtype: str, reference: torch.Tensor, num_threads: int) -> Quality:
    logits, token_ids, weight_bytes = _logits(path, dtype, num_threads)
    scores, expected = logits.log_softmax(-1), reference.log_softmax(-1)
    likelihoods = scores[:-1].gather(1, token_ids[1:, None])
    return Quality(
        dtype=dtype,
        weight_bytes=weight_bytes,
        perplexity=float(torch.exp(-likelihoods.mean())),
        divergence=float((expected.exp() * (expected - scores)).sum(-1).mean()),
        agreement=float((logits.argmax(-1) == reference.argmax(-1)).float().mean()),
        is_identical=torch.equal(logits, reference),
    )


def _logits(path: Path, dtype: str, num_threads: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Logits of every position `[num_tokens, vocab_size]`, the token ids, and the bytes of the weights."""
    loaded = load_model(path, dtype=dtype, kernels="cpu", num_threads=num_threads)
    assert isinstance(loaded.model, CpuDecoder)
    token_ids = torch.tensor(loaded.tokenizer.encode(TEXT))
    length, config = token_ids.numel(), loaded.config
    num_blocks = -(-length // BLOCK_SIZE)
    shape = (num_blocks, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    everywhere = torch.arange(length)
    batch = ForwardBatch(
        token_ids=token_ids,
        positions=everywhere,
        slot_mapping=everywhere,
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        query_start=(0, length),
        seq_lens=(length,),
        logits_indices=everywhere,
    )
    logits = loaded.model.forward(batch, torch.zeros(shape, dtype=loaded.model.dtype))
    return logits, token_ids, loaded.model.weight_bytes
