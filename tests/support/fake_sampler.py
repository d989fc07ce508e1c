"""A greedy sampler that checks how the core drives it: rows are known, dense, and told about every token kept."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from common.engine.outputs import PositionLogprobs
from common.engine.sampling.batch_state import AddedRow, BatchUpdate


@dataclass(frozen=True)
class FakeSampleOutput:
    token_ids: list[int]
    logprobs: list[PositionLogprobs | None]
    failed_rows: frozenset[int]


@dataclass
class GreedySampler:
    """A `SamplerPort`. `rows` maps persistent row -> (what was added, tokens recorded since)."""

    rows: dict[int, tuple[AddedRow, list[int]]] = field(default_factory=dict)
    masked_steps: list[int] = field(default_factory=list)

    def update_batch(self, update: BatchUpdate) -> None:
        for row in update.removed:
            del self.rows[row]
        for added in update.added:
            assert added.row not in self.rows
            self.rows[added.row] = (added, list(added.output_token_ids))
        for moved in update.moved:
            assert moved.target not in self.rows
            self.rows[moved.target] = self.rows.pop(moved.source)
        assert sorted(self.rows) == list(range(len(self.rows)))

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        bitmask: torch.Tensor | None = None,
        masked_rows: Sequence[int] = (),
        drafts: Sequence[Sequence[int]] = (),
        highest: torch.Tensor | None = None,
    ) -> FakeSampleOutput:
        assert highest is None or len(highest) == len(rows)
        assert len(rows) == logits.shape[0]
        assert len(drafts) in (0, len(rows))
        assert len({(row, len(draft)) for row, draft in zip(rows, drafts or [()] * len(rows), strict=True)}) == len(
            rows
        )
        assert set(rows) <= set(self.rows)
        self.masked_steps.append(len(masked_rows))
        failed = set()
        if bitmask is not None:
            assert bitmask.shape[0] == len(masked_rows)
            bits = np.unpackbits(bitmask.numpy().view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
            for row, allowed in zip(masked_rows, bits, strict=True):
                logits[row, torch.from_numpy(allowed == 0)] = -torch.inf
                if not allowed.any():
                    failed.add(row)
        return FakeSampleOutput(logits.argmax(dim=1).tolist(), [None] * len(rows), frozenset(failed))

    def record(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        for row, token_id in zip(rows, token_ids, strict=True):
            self.rows[row][1].append(token_id)
