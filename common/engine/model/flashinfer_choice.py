"""Whether FlashInfer can be trusted with a model on this device: what it does not compute, a check of what it does.

Journey row 0 (startup). Owns: the only import of `flashinfer`, its workspace, the self-check. Does not know what
happens where the answer is no.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Protocol

import structlog
import torch

from common.engine.model.attention import Attention, TorchPagedAttention
from common.engine.model.config import ModelConfig
from common.engine.model.flashinfer_attention import CopyFence, CudaFence, FlashInferAttention, PagedPrefill
from common.engine.model.forward import ForwardBatch
from common.errors import StartupError

log = structlog.get_logger(__name__)

HEAD_DIMS = (64, 128, 256)
"""FlashInfer compiles others too, and reads memory it does not own (its issue 4299), which no check survives."""

TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""The dtypes it computes and how far (absolute and relative) they may be from float32."""

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends. Split histories need blocks in flight x 128 rows x head_dim floats: 35 MB on 132 SMs."""

BACKEND = "fa2"
"""One kernel for every card and length: what the self-check has seen is what serves. `auto` picks by shape."""

_CHECK_BLOCK_SIZE = 16
_CHECK_BLOCKS = 96
_CHECK_WINDOW = 20
_CHECKS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 1), (777, 1), (150, 100), (0, 70), (33, 3), (47, 1)),
    ((15, 1), (16, 1), (500, 1)),
)
"""Batches of (tokens in the cache, tokens to compute): mixed, then decodes, so that a plan follows another one.
Their caches are of one size: a kernel that mixes plans up answers wrongly, and harms nobody."""


class FlashInferUnusable(StartupError):
    """FlashInfer is not for this model or does not work here; the message says why. Triton serves without it."""


@dataclass(frozen=True, slots=True)
class OpenedFlashInfer:
    """A wrapper and the fence of its pinned buffer."""

    wrapper: PagedPrefill
    fence: CopyFence


class FlashInferLibrary(Protocol):
    """Where FlashInfer comes from."""

    def open(self, device: torch.device) -> OpenedFlashInfer:
        """A wrapper of its own. Whatever it raises is a reason not to use it."""
        ...

    def finish(self, device: torch.device) -> None:
        """Wait for the device. Raises what its kernels did wrong."""
        ...


class InstalledFlashInfer:
    """The package `flashinfer` of this environment, if there is one."""

    def open(self, device: torch.device) -> OpenedFlashInfer:
        """See `FlashInferLibrary.open`; imported here, so that nobody else pays for it."""
        if find_spec("flashinfer") is None:
            raise FlashInferUnusable("flashinfer is not installed")
        import flashinfer

        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=BACKEND)
        return OpenedFlashInfer(wrapper, CudaFence(device))

    def finish(self, device: torch.device) -> None:
        """See `FlashInferLibrary.finish`."""
        torch.cuda.synchronize(device)


def open_flashinfer(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, recorded: Attention, library: FlashInferLibrary
) -> FlashInferAttention:
    """FlashInfer's attention after it gave the right answers here. The first start compiles kernels: about a minute.

    Args:
        config: the model's shape.
        dtype: of activations and the KV cache.
        device: where it would run.
        recorded: attends batches that are recorded as graphs.
        library: makes the wrapper.

    Raises:
        FlashInferUnusable: with the reason; the device is as good as before.
        StartupError: the check broke the device.
    """
    reason = unsupported_reason(config, dtype)
    if reason is not None:
        raise FlashInferUnusable(reason)
    try:
        opened = library.open(device)
        log.info("flashinfer.check", device=str(device), backend=BACKEND)
        checked = replace(config, sliding_window=config.sliding_window and min(config.sliding_window, _CHECK_WINDOW))
        attention = FlashInferAttention(checked, opened.wrapper, opened.fence, recorded)
        errors = [largest_error(attention, checked, dtype, device, sequences) for sequences in _CHECKS]
        library.finish(device)
    except FlashInferUnusable:
        raise
    except Exception as fault:  # a package, a compiler or a driver: it may fail in any way
        reason = f"FlashInfer does not work here: {_one_line(fault)}"
        _require_working(device, library, reason)
        raise FlashInferUnusable(reason) from fault
    for error in errors:
        if not error <= 1:  # not a number is wrong, too
            raise FlashInferUnusable(
                f"FlashInfer's self-check is off by {error:.3g} times what {_name(dtype)} explains"
            )
    return FlashInferAttention(config, opened.wrapper, opened.fence, recorded)


def unsupported_reason(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """What FlashInfer does not compute of this model, or None. Asked before anything runs."""
    if dtype not in TOLERANCES:
        return f"FlashInfer does not compute {_name(dtype)}"
    if config.head_dim not in HEAD_DIMS:
        return f"FlashInfer computes heads of {', '.join(map(str, HEAD_DIMS))}, not of {config.head_dim}"
    return None


def largest_error(
    attention: Attention,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    sequences: Sequence[tuple[int, int]],
) -> float:
    """Distance of `attention` from plain float32 attention on the CPU, in tolerances of `dtype`: right up to 1.

    Args:
        attention: is asked for layer 1 of a random cache with two.
        config: the shape.
        dtype: of queries and cache.
        device: where `attention` computes.
        sequences: (tokens in the cache, tokens to compute) of each.
    """
    generator = torch.Generator().manual_seed(len(sequences))
    batch = _scattered_batch(sequences, generator)
    cache_shape = (_CHECK_BLOCKS, 2, 2, _CHECK_BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    cache = torch.randn(cache_shape, generator=generator).to(dtype)
    num_heads = config.num_heads + 2 * config.num_kv_heads
    heads = torch.randn((len(batch.positions), num_heads, config.head_dim), generator=generator).to(dtype)
    truth = TorchPagedAttention(config).attend(*_views(heads.float(), config), 1, batch, cache.float())
    views = _views(heads.to(device), config)
    out = attention.attend(*views, 1, _moved(batch, device), cache.to(device)).float().cpu()
    tolerance = TOLERANCES[dtype]
    return float(((out - truth).abs() / (tolerance + tolerance * truth.abs())).max())


def _views(heads: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value out of one tensor, as a decoder's are: tokens lie further apart than their heads need."""
    num_heads, end = config.num_heads, config.num_heads + config.num_kv_heads
    return heads[:, :num_heads], heads[:, num_heads:end], heads[:, end:]


def _scattered_batch(sequences: Sequence[tuple[int, int]], generator: torch.Generator) -> ForwardBatch:
    """A batch on the host whose blocks lie in no order."""
    lengths = [history + new for history, new in sequences]
    counts = [-(-length // _CHECK_BLOCK_SIZE) for length in lengths]
    order = torch.randperm(_CHECK_BLOCKS, generator=generator)
    tables = torch.zeros((len(sequences), max(counts)), dtype=torch.int32)
    for table, count in zip(tables, counts, strict=True):
        table[:count], order = order[:count], order[count:]
    places = [torch.arange(history, history + new) for history, new in sequences]
    slots = [
        table[place // _CHECK_BLOCK_SIZE] * _CHECK_BLOCK_SIZE + place % _CHECK_BLOCK_SIZE
        for table, place in zip(tables.long(), places, strict=True)
    ]
    starts = torch.tensor([0, *(new for _, new in sequences)]).cumsum(0)
    return ForwardBatch(
        token_ids=torch.zeros(int(starts[-1]), dtype=torch.int64),
        positions=torch.cat(places),
        slot_mapping=torch.cat(slots),
        block_tables=tables,
        query_start=tuple(starts.tolist()),
        seq_lens=tuple(lengths),
        logits_indices=starts[1:] - 1,
    )


def _moved(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    return replace(
        batch,
        token_ids=batch.token_ids.to(device),
        positions=batch.positions.to(device),
        slot_mapping=batch.slot_mapping.to(device),
        block_tables=batch.block_tables.to(device),
        logits_indices=batch.logits_indices.to(device),
    )


def _require_working(device: torch.device, library: FlashInferLibrary, reason: str) -> None:
    """A kernel that read foreign memory leaves the process without its device: say so instead of going on.

    Raises:
        StartupError: the device is lost.
    """
    try:
        library.finish(device)
    except Exception as lost:
        raise StartupError(f"{reason}; {device} is lost with it: start with attention_backend: triton") from lost


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _one_line(fault: Exception) -> str:
    text = " ".join(str(fault).split())
    return f"{type(fault).__name__}: {text[:200]}" if text else type(fault).__name__
