from collections.abc import Sequence
from importlib.metadata import EntryPoint

import pytest
import torch

from common.engine.sampling.batch_state import BatchUpdate, MovedRow
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.processors.loading import ENTRY_POINT_GROUP, build_processors, load_processors
from common.engine.sampling.processors.processor import LogitsProcessor, PerRequestProcessor, ProcessorContext
from common.engine.sampling.sampler import Sampler
from common.errors import StartupError
from tests.support import logits_processors
from tests.support.logits_processors import DropBelow, PreferToken
from tests.support.sampling_batch import CPU, added

CONTEXT = ProcessorContext(vocab_size=10, max_rows=8, device=CPU)
MODULE = logits_processors.__name__


def sampler_with(*classes: type[LogitsProcessor]) -> Sampler:
    return Sampler(10, 8, CPU, processors=build_processors(classes, CONTEXT))


def test_processors_load_by_module_and_class_and_by_entry_point_each_once():
    point = EntryPoint(name="prefer", value=f"{MODULE}:PreferToken", group=ENTRY_POINT_GROUP)
    assert load_processors([f"{MODULE}:DropBelow", f"{MODULE}:PreferToken"], [point]) == (PreferToken, DropBelow)


def test_the_environment_without_entry_points_loads_nothing():
    assert load_processors([]) == ()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no.such.module:Class", "No module named"),
        (f"{MODULE}:Missing", "Missing"),
        (f"{MODULE}", "module:Class"),
        (f"{MODULE}:NotAProcessor", "no subclass"),
        (f"{MODULE}:not_a_class", "no subclass"),
        ("tests.support.broken_processor_module:Any", "broken on purpose"),
    ],
)
def test_a_processor_that_does_not_load_stops_the_start_with_the_reason(path, reason):
    with pytest.raises(StartupError, match=reason) as failure:
        load_processors([path], [])
    assert "\n" not in str(failure.value)


def test_a_processor_whose_constructor_fails_stops_the_start_with_the_reason():
    with pytest.raises(StartupError, match="no such file"):
        build_processors([logits_processors.FailsToBuild], CONTEXT)


def test_a_custom_processor_changes_greedy_rows_and_follows_moves():
    sampler = sampler_with(PreferToken)
    wants = SamplingParams(temperature=0.0, extra_args={"prefer": 3})
    sampler.update_batch(BatchUpdate(added=(added(0, wants), added(1, SamplingParams(temperature=0.0)))))
    logits = torch.zeros(2, 10)
    logits[:, 8] = 1.0
    assert sampler.sample(logits.clone(), [0, 1]).token_ids == [3, 8]
    sampler.update_batch(BatchUpdate(removed=(1,), moved=(MovedRow(source=0, target=5),)))
    assert sampler.sample(logits[:1].clone(), [5]).token_ids == [3]


def test_an_argmax_invariant_processor_is_left_out_for_greedy_rows_and_used_for_random_ones():
    sampler = sampler_with(DropBelow)
    sampler.update_batch(BatchUpdate(added=(added(0, SamplingParams(temperature=0.0)),)))
    DropBelow.calls = 0
    sampler.sample(torch.zeros(1, 10), [0])
    assert DropBelow.calls == 0
    sampler.update_batch(BatchUpdate(added=(added(1, SamplingParams(temperature=1.0)),)))
    logits = torch.zeros(2, 10)
    logits[:, 4] = 0.5
    assert sampler.sample(logits, [0, 1]).token_ids == [4, 4]
    assert DropBelow.calls == 1


class NoRepeat(PerRequestProcessor):
    """Per request: never the token before."""

    def new_request(self, params: SamplingParams, prompt_token_ids: Sequence[int]):
        if not params.extra_args.get("no_repeat"):
            return None

        def mask(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            last = output[-1] if output else prompt_token_ids[-1]
            return logits.index_fill(0, torch.tensor([last]), -torch.inf)

        return mask


def test_a_function_per_request_sees_the_growing_output_and_drafts():
    sampler = sampler_with(NoRepeat)
    wants = SamplingParams(temperature=0.0, extra_args={"no_repeat": True})
    rows = (added(0, wants, prompt_token_ids=(9,)), added(1, SamplingParams(temperature=0.0)))
    sampler.update_batch(BatchUpdate(added=rows))
    logits = torch.arange(10, dtype=torch.float32).repeat(2, 1)
    assert sampler.sample(logits.clone(), [0, 1]).token_ids == [8, 9]
    sampler.record([0, 1], [8, 9])
    assert sampler.sample(logits.clone(), [0, 1]).token_ids == [9, 9]
    assert sampler.sample(logits.clone(), [0, 0], drafts=[(), (9,)]).token_ids == [9, 8]
