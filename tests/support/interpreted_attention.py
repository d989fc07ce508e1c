"""Runs the Triton attention on the CPU and prints each case's distance from the definition as JSON.

A program of its own: Triton decides on its interpreter when it is first imported (TRITON_INTERPRET=1).
"""

import json
import sys

import torch

from common.engine.model.triton_attention import TritonPagedAttention
from tests.support.attention_cases import make_case
from tests.support.tiny_model import tiny_config

# (history, new tokens) of each sequence; (query heads, KV heads); window; head_dim
CASES = [
    ([(0, 1)], (4, 2), None, 8),
    ([(7, 1), (0, 9), (3, 2), (12, 1)], (4, 2), None, 8),
    ([(7, 1), (0, 9), (3, 2)], (3, 3), 5, 24),
    ([(3, 70), (40, 1)], (9, 3), None, 16),
    ([(3, 70)], (6, 1), 33, 16),
    ([(1300, 1), (1, 1), (40, 2)], (4, 1), None, 8),
    ([(1300, 1)], (4, 1), 700, 8),
]


def main() -> int:
    torch.set_num_threads(1)
    differences = []
    for history_and_new, (num_heads, num_kv_heads), window, head_dim in CASES:
        config = tiny_config(num_heads=num_heads, num_kv_heads=num_kv_heads, sliding_window=window, head_dim=head_dim)
        arguments, truth = make_case(config, history_and_new, seed=7)
        out = TritonPagedAttention(config).attend(*arguments)
        differences.append(float((out - truth).abs().max()))
    sys.stdout.write(json.dumps(differences) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
