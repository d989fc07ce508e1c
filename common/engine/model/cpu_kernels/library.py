"""The C border of the kernels as ctypes sees it; calls release the GIL.

Owns: the structures of csrc/ (same fields, same order) and the loaded library. Does not know tensors.
"""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache

import structlog

from common.engine.model.cpu_kernels.build import CannotBuild, ensure_built

log = structlog.get_logger(__name__)


class Packed(Structure):
    """A packed weight matrix (csrc/packed.h)."""

    _fields_ = (
        ("format", c_int32),
        ("paired", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("data", c_void_p),
        ("bias", c_void_p),
    )


class LayerWeights(Structure):
    """One layer (csrc/decoder.h)."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", Packed),
        ("output", Packed),
        ("gate_up", Packed),
        ("down", Packed),
    )


class DecoderShape(Structure):
    """`DecoderConfig` of csrc/decoder.h."""

    _fields_ = (
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate", c_int32),
        ("vocab", c_int32),
        ("max_positions", c_int32),
        ("window", c_int32),
        ("norm_eps", c_float),
        ("attention_scale", c_float),
    )


class Step(Structure):
    """One forward's batch (csrc/decoder.h); all pointers to host memory."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("logits_indices", c_void_p),
        ("block_tables", c_void_p),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("num_tokens", c_int64),
        ("num_seqs", c_int64),
        ("max_blocks", c_int64),
        ("num_logits", c_int64),
        ("highest", c_void_p),
    )


class Cache(Structure):
    """The paged KV cache (csrc/ops.h)."""

    _fields_ = (
        ("data", c_void_p),
        ("is_bf16", c_int32),
        ("num_layers", c_int32),
        ("block_size", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("num_blocks", c_int64),
    )


class RowTiles(Structure):
    """Rows laid out for the tile unit, or none (csrc/row_tiles.h)."""

    _fields_ = (("kind", c_int32), ("height", c_int32), ("data", c_void_p), ("k_end", c_int64))


class AttentionArgs(Structure):
    """What `pd_attention` needs beside the sequences (csrc/attention.h)."""

    _fields_ = (
        ("cache", Cache),
        ("layer", c_int32),
        ("group", c_int32),
        ("window", c_int32),
        ("q", c_void_p),
        ("ldq", c_int64),
        ("out", c_void_p),
        ("ldo", c_int64),
        ("block_tables", c_void_p),
        ("max_blocks", c_int64),
        ("scale", c_float),
        ("use_tiles", c_int32),
        ("out_tiles", RowTiles),
    )


SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "pd_lanes": (c_int64, []),
    "pd_has_tiles": (c_int32, []),
    "pd_advise_huge": (None, [c_void_p, c_int64]),
    "pd_threads_new": (c_void_p, [c_int32]),
    "pd_threads_free": (None, [c_void_p]),
    "pd_read": (c_float, [c_void_p, c_void_p, c_int64]),
    "pd_packed_bytes": (c_int64, [POINTER(Packed)]),
    "pd_packed_columns": (c_int64, [POINTER(Packed)]),
    "pd_pack": (c_int32, [c_void_p, POINTER(Packed), c_void_p, c_void_p, c_int32]),
    "pd_pack_bias": (None, [POINTER(Packed), c_void_p, c_void_p]),
    "pd_unpack_row": (None, [POINTER(Packed), c_int64, c_void_p]),
    "pd_linear": (None, [c_void_p, POINTER(Packed), c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int32]),
    "pd_exp": (None, [c_void_p, c_int64, c_void_p]),
    "pd_rms_norm": (None, [c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p]),
    "pd_attention": (None, [c_void_p, POINTER(AttentionArgs), c_void_p, c_void_p, c_int64]),
    "pd_decoder_new": (
        c_void_p,
        [
            POINTER(DecoderShape),
            POINTER(LayerWeights),
            POINTER(Packed),
            POINTER(Packed),
            c_void_p,
            c_void_p,
            c_void_p,
            c_int32,
        ],
    ),
    "pd_decoder_free": (None, [c_void_p]),
    "pd_decoder_forward": (c_int32, [c_void_p, POINTER(Step), POINTER(Cache), c_void_p]),
}


@cache
def load_library() -> ctypes.CDLL:
    """The library, built if need be; one per process.

    Raises:
        CannotBuild: see `build.ensure_built`, or the built file cannot be loaded.
    """
    path = ensure_built()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotBuild(f"CPU kernels: {path} does not load: {error}") from error
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def available() -> bool:
    """Whether the kernels run here; builds them on the first call, and logs once why they do not."""
    try:
        load_library()
    except CannotBuild as error:
        log.warning("cpu_kernels.unavailable", reason=str(error), fallback="torch")
        return False
    return True
