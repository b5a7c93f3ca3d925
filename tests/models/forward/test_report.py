"""Numbers that layers report come out of every loop that layers run in."""

import dataclasses

import jax.numpy as jnp
import pytest

from models import EXPERT_TOKENS, LoadedModel, ModelError, Wants
from models.forward.layer_context import LayerContext
from models.forward.report import Report, first_reports
from tests import on_device
from tests.models.plain_context import plain_context
from tests.models.steppers import IN_TURN, in_loop
from tests.oracles.paged_stepper import NUM_TOKENS, PagedStepper
from tests.oracles.token_experts import (
    NUM_EXPERTS,
    NUM_LAYERS,
    count_choices,
    make_token_experts,
)

# Steps of one token, of all three requests, and of a few tokens: for each of the widths below.
CHUNKS = (
    {0: [7]},
    {0: [3, 4, 5, 6, 7, 8], 1: [11, 3, 11, 25, 30, 31, 59], 2: [9]},
    {0: [2], 1: [50, 51, 52], 2: [9]},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LoadedModel:
    model = make_token_experts(tmp_path_factory.mktemp("moe"))
    return dataclasses.replace(model, platform=IN_TURN)


@pytest.mark.parametrize(
    ("loops_over_layers", "widths", "only_last_tokens", "taps"),
    [
        pytest.param(False, (), False, (), marks=pytest.mark.slow),
        pytest.param(True, (1, 8, NUM_TOKENS), True, (), marks=pytest.mark.slow),
        # `test_expert_load.py` compares the counts of an engine's steps and bursts.
        pytest.param(True, (), False, (2,), marks=pytest.mark.slow),
    ],
)
def test_each_layer_reports_the_choices_of_its_tokens(
    model, loops_over_layers, widths, only_last_tokens, taps
):
    wants = Wants(reports=(Report(name=EXPERT_TOKENS, dims=(NUM_EXPERTS,)),), taps=taps)
    stepper = PagedStepper(
        in_loop(model) if loops_over_layers else model,
        only_last_tokens=only_last_tokens,
        widths=widths,
        wants=wants,
    )
    for chunks in CHUNKS:
        stepper.step(chunks)
        (reported_np,) = stepper.reports.values()
        assert reported_np.shape == (NUM_LAYERS, NUM_EXPERTS)
        for layer_idx in range(NUM_LAYERS):
            is_last = layer_idx == NUM_LAYERS - 1
            first = -1 if only_last_tokens and is_last else 0
            token_ids = [token_id for chunk in chunks.values() for token_id in chunk[first:]]
            expected_np = count_choices(model, token_ids, layer_idx)
            assert reported_np[layer_idx].tolist() == expected_np.tolist()


def counting_context(*reports: Report) -> LayerContext:
    return plain_context(3).with_reported(first_reports(reports, num_layers=2)).at(1, ())


def test_reports_of_one_name_add_up_and_others_are_not_computed():
    context = counting_context(Report(name="rows", dims=(2,)))
    context.report("rows", lambda: on_device.array([1, 2], jnp.int32))
    context.report("rows", lambda: on_device.array([3, 0], jnp.int32))
    context.report("others", lambda: pytest.fail("nothing asked for it"))
    assert {name: rows.tolist() for name, rows in context.reported.items()} == {
        "rows": [[0, 0], [4, 2]]
    }


def test_report_of_another_shape_is_refused():
    context = counting_context(Report(name="rows", dims=(2,)))
    with pytest.raises(ModelError, match=r"reports int32\[3\] as 'rows'; .* int32\[2\]"):
        context.report("rows", lambda: on_device.zeros(3, jnp.int32))
