"""Runs in vLLM's own environment: its Sampler on the jobs `peer.py` sends, one timed step per line.

What its model runner does once per change of the batch (metadata, prompt tensors) is set up outside the timed step, as
is the copy of the logits; appending the sampled tokens to the output lists is inside, as the next step needs them.
"""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
_CASES: Any = importlib.import_module("cases")


def main() -> None:
    """Answer lines until an empty one."""
    step: Any = None
    while line := sys.stdin.readline().strip():
        if line == "step":
            print("answer", step(), flush=True)
            continue
        job = json.loads(line)
        torch.set_num_threads(job["threads"])
        step = _prepare(
            _CASES.Case(**job["case"]),
            _CASES.Shape(**job["shape"]),
            Path(job["logits_file"]),
            _CASES.CLOCKS[job["clock"]],
        )
        step()
        print("answer ready", flush=True)


def _prepare(case: Any, shape: Any, logits_file: Path, clock: Any) -> Any:
    sampler = importlib.import_module("vllm.v1.sample.sampler").Sampler()
    logits = torch.from_numpy(np.load(logits_file, mmap_mode="r")[: shape.batch_size].copy())
    metadata, outputs = _metadata(case, shape)
    bitmask = torch.from_numpy(case.bitmask(shape)) if case.allowed_share else None
    mask: Any = importlib.import_module("xgrammar").apply_token_bitmask_inplace if case.allowed_share else None

    def step() -> float:
        """Sample once from fresh logits and keep the tokens; seconds without the copy."""
        fresh = logits.clone()
        start = clock()
        if mask is not None:
            mask(fresh, bitmask)
        output = sampler(fresh, metadata)
        for tokens, new in zip(outputs, output.sampled_token_ids.tolist(), strict=True):
            tokens.extend(new)
        if output.logprobs_tensors is not None:
            output.logprobs_tensors.tolists()
        elapsed: float = clock() - start
        return elapsed

    return step


def _metadata(case: Any, shape: Any) -> tuple[Any, list[list[int]]]:
    rows, vocab_size = shape.batch_size, shape.vocab_size
    params = case.params
    histories = [_CASES.history(row, _CASES.PROMPT_TOKENS + shape.output_tokens, vocab_size) for row in range(rows)]
    outputs = [tokens[_CASES.PROMPT_TOKENS :] for tokens in histories]
    temperature = torch.full((rows,), params["temperature"])
    if case.greedy_every:
        temperature[:: case.greedy_every] = 0.0
    all_greedy, all_random = bool((temperature == 0).all()), bool((temperature > 0).all())
    has_penalties = any(name.endswith("_penalty") for name in params)
    words = case.token_ids(2 * case.num_bad_words, vocab_size)
    metadata = importlib.import_module("vllm.v1.sample.metadata").SamplingMetadata(
        temperature=None if all_greedy else temperature,
        all_greedy=all_greedy,
        all_random=all_random,
        top_p=torch.full((rows,), params["top_p"]) if "top_p" in params else None,
        top_k=torch.full((rows,), int(params["top_k"]), dtype=torch.int32) if "top_k" in params else None,
        generators={row: torch.Generator().manual_seed(row) for row in range(rows)} if case.seeded else {},
        max_num_logprobs=int(params["logprobs"]) if "logprobs" in params else None,
        no_penalties=not has_penalties,
        prompt_token_ids=torch.tensor([tokens[: _CASES.PROMPT_TOKENS] for tokens in histories]),
        frequency_penalties=torch.full((rows,), params.get("frequency_penalty", 0.0)),
        presence_penalties=torch.full((rows,), params.get("presence_penalty", 0.0)),
        repetition_penalties=torch.full((rows,), params.get("repetition_penalty", 1.0)),
        output_token_ids=outputs,
        allowed_token_ids_mask=_allowed_mask(case, rows, vocab_size),
        bad_words_token_ids={
            row: [list(word) for word in zip(words[::2], words[1::2], strict=True)] for row in range(rows)
        }
        if words
        else {},
        logitsprocs=_processors(case, shape, outputs),
        logprob_token_ids=dict.fromkeys(range(rows), case.token_ids(case.num_reported, vocab_size))
        if case.num_reported
        else None,
        thinking_budget_state_holder=_thinking(case, shape, histories, outputs),
    )
    return metadata, outputs


def _allowed_mask(case: Any, rows: int, vocab_size: int) -> torch.Tensor | None:
    if not case.num_allowed:
        return None
    mask = torch.ones(rows, vocab_size, dtype=torch.bool)
    mask[:, case.token_ids(case.num_allowed, vocab_size)] = False
    return mask


def _thinking(case: Any, shape: Any, histories: list[list[int]], outputs: list[list[int]]) -> Any:
    """Its state of thinking sections that every prompt opened."""
    if case.thinking_budget is None:
        return None
    opens, closes = _CASES.thinking_markers(shape.vocab_size)
    tags = SimpleNamespace(reasoning_start_token_ids=[opens], reasoning_end_token_ids=[closes])
    module = importlib.import_module("vllm.v1.sample.thinking_budget_state")
    holder = module.ThinkingBudgetStateHolder(tags, shape.batch_size, 0, torch.device("cpu"), False)
    params = importlib.import_module("vllm").SamplingParams(
        thinking_token_budget=case.thinking_budget, max_tokens=1 << 20
    )
    prompts = [[*tokens[: _CASES.PROMPT_TOKENS - 1], opens] for tokens in histories]
    added = [(row, params, prompts[row], outputs[row]) for row in range(shape.batch_size)]
    update = importlib.import_module("vllm.v1.sample.logits_processor").BatchUpdate(
        batch_size=shape.batch_size, removed=[], added=added, moved=[]
    )
    holder.sync_batch(update)
    return holder


def _processors(case: Any, shape: Any, outputs: list[list[int]]) -> Any:
    """Its built-in processors, told about every row, as after an admission."""
    module = importlib.import_module("vllm.v1.sample.logits_processor")
    params_class = importlib.import_module("vllm").SamplingParams
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=shape.batch_size), speculative_config=None)
    processors = module.build_logitsprocs(config, torch.device("cpu"), False, False)
    biased = case.token_ids(case.num_biased, shape.vocab_size)
    known = {name: value for name, value in case.params.items() if name in ("min_p", "min_tokens", "temperature")}
    params = params_class(
        **known, logit_bias=dict.fromkeys(biased, 1.0) or None, stop_token_ids=[2], max_tokens=1 << 20
    )
    update = module.BatchUpdate(
        batch_size=shape.batch_size,
        removed=[],
        added=[(row, params, [], outputs[row]) for row in range(shape.batch_size)],
        moved=[],
    )
    for processor in processors.all:
        processor.update_state(update)
    return processors


if __name__ == "__main__":
    main()
