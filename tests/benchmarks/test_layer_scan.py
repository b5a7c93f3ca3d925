"""All ways to run layers compute the same, and are measured alike."""

import pytest

from benchmarks import layer_scan
from benchmarks.layer_scan import WAYS, Work, compile_variant, measure_steps
from benchmarks.random_checkpoint import MODEL_SHAPES, write_checkpoint
from models import load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_checkpoint(tmp_path_factory.mktemp("tiny"), MODEL_SHAPES["tiny"]))


def test_layers_are_stacked_in_their_order(model):
    outer, stacked = layer_scan.split_params(model)
    assert len(outer) + 2 * len(stacked) == len(model.params)
    by_name = dict(zip(model.param_names, model.params, strict=True))
    first = [name for name in model.param_names if name.startswith("layers.0.")]
    for name, array in zip(first, stacked, strict=True):
        for layer_idx in range(2):
            other = by_name[name.replace("layers.0.", f"layers.{layer_idx}.")]
            assert (array[layer_idx] == other).all()


@pytest.mark.slow
def test_all_ways_give_the_same_logits(model):
    work = Work(name="decode", num_reqs=2, num_new_tokens=1, context_len=20)
    variants = [compile_variant(way, model, work) for way in WAYS]
    measure_steps(variants, model, work, num_repetitions=2)
    assert all(len(variant.step_ms) == 2 for variant in variants)
    # With one layer's weights for another's they differ.
    scanned = variants[1]
    scanned.stacked = tuple(array[::-1] for array in scanned.stacked)
    with pytest.raises(RuntimeError, match="logits of scanned and unrolled layers differ"):
        measure_steps(variants, model, work, num_repetitions=1)
