"""Programs without the sampler's filters, processors and log-probabilities, for greedy tests.

The sampler takes most of the time to compile a program of a tiny model.
"""

import contextlib
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from paxkv.runner.programs import generation
from paxkv.runner.sampling import draw_rows
from paxkv.runner.sampling.sampled_tokens import RESULT_WIDTH, unpack_result
from paxkv.runner.sampling.sampler import argmax_grouped


def _draw_greedily(logits_of, state, sampling, token_mask, greedy_ids, mesh):
    return _pack(argmax_grouped(logits_of(), mesh))


def _sample_greedily(logits, inputs, *, mesh):
    return unpack_result(_pack(argmax_grouped(logits, mesh)))


def _pack(token_ids):
    return jnp.pad(token_ids[:, None], ((0, 0), (0, RESULT_WIDTH - 1)))


@contextlib.contextmanager
def greedy_draws() -> Iterator[None]:
    """Programs traced meanwhile draw the most likely token, whatever a request asks for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw_rows, "_draw_chunk", _draw_greedily)
        patch.setattr(generation, "sample", _sample_greedily)
        yield
