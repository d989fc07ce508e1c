import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

REPOSITORY = Path(__file__).parents[5]
HOPPER = ("cuda", 90, 32)
TYPES = {
    "kv_cache": "*{}",
    "query": "*{}",
    "out": "*{}",
    "tiles": "*i32",
    "positions": "*i64",
    "block_tables": "*i32",
    "partial": "*fp32",
    "log_sums": "*fp32",
}
CONSTANTS = {
    "NUM_HEADS": 32,
    "NUM_KV_HEADS": 8,
    "HEAD_DIM": 128,
    "PADDED_HEAD_DIM": 128,
    "BLOCK_SIZE": 16,
    "KEYS": 32,
    "NUM_SPLITS": 4,
}


def run_python(arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_interpreted_kernels_equal_plain_attention():
    done = run_python(["-m", "tests.support.interpreted_attention"], TRITON_INTERPRET="1")

    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout)
    assert len(differences) == 7
    assert max(differences) < 1e-5, differences


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize(("dtype", "rows", "window"), [("bf16", 16, 0), ("fp16", 64, 128)])
def test_kernels_compile_for_a_gpu_that_is_not_here(dtype, rows, window):
    from common.engine.model.triton_kernels import combine_splits, paged_attention

    constants = {**CONSTANTS, "WINDOW": window, "ROWS": rows, "TOKENS": rows // 4}
    for kernel in (paged_attention, combine_splits):
        taken = {name: constants[name] for name in kernel.arg_names if name in constants}
        types = {name: TYPES.get(name, "i32").format(dtype) for name in kernel.arg_names}
        signature = {**types, **dict.fromkeys(taken, "constexpr")}
        source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=taken)
        compiled = triton.compile(source, target=triton.backends.compiler.GPUTarget(*HOPPER))
        assert compiled.asm["cubin"]
