"""Checks of devices that share the positions of a context."""

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from models.forward.kernel_settings import TOKENS_BY_HEAD, WHOLE, KernelSettings
from paxkv.runner.memory.device_mesh import find_mesh
from tests.end_to_end.engine_harness import RecordingRunner, RunResult, run_engine
from tests.end_to_end.split_collectives import check_cache_in_place
from tests.end_to_end.split_configs import CONFIGS, LIMITS, PARAMS, SETTINGS
from tests.quick_compile import QUICK_COMPILE


def check_merged_attention(num_devices: int, num_ranks: int, dtype: str, atol: float) -> None:
    """Ranks that write and read their own positions compute what one device computes."""
    rng = np.random.default_rng(0)
    num_tokens, width = 35, 8  # prompts of 21 and 13 tokens, and one of padding
    q = jnp.asarray(rng.standard_normal((num_tokens, 2 * num_devices, width)), dtype)
    kv = jnp.asarray(rng.standard_normal((2, num_tokens, 1, width)), dtype)
    starts = jnp.array([0, 21, 34])
    positions = jnp.array([*range(21), *range(13), 0])
    lens = jnp.array([21, 13])
    tables = jnp.array([[2, 1], [3, 0]])

    ranks = KernelSettings.for_mesh(find_mesh(num_devices), num_context_ranks=num_ranks)
    block_size = 8  # of each rank

    def run(rows: jax.Array, query_starts: jax.Array, max_query_len: int | None) -> np.ndarray:
        def of_own_heads(q: jax.Array, slots: jax.Array, *last: jax.Array) -> jax.Array:
            pad_slot = pallas_kernels.pad_slot(1, 4, block_size)
            slots = ranks.context_ranks.own_slots(slots, positions, pad_slot)
            cache = jnp.full((1, 8, 1, block_size, width), jnp.nan, dtype)
            cache = pallas_kernels.kv_scatter(cache, *kv, slots, 0)
            rows, query_starts = last

            def attend(q: jax.Array, lens: jax.Array, **options: Any) -> Any:
                return pallas_kernels.paged_attention(
                    *(q, cache, 0, tables, lens, query_starts), scale=0.5, **options
                )

            return ranks.context_ranks.attend(
                *(attend, (q[rows],), lens, query_starts), max_query_len=max_query_len
            )

        specs = (TOKENS_BY_HEAD, WHOLE, WHOLE, WHOLE)

        def program(q: jax.Array, *last: jax.Array) -> jax.Array:
            slots = ranks.slot_mapping(
                *(positions[None], tables[None], starts),
                **{"block_size": block_size, "num_rows": 1, "num_blocks": 4},
            )[0]
            return ranks.by_device(
                of_own_heads, q, slots, *last, in_specs=specs, out_specs=TOKENS_BY_HEAD
            )

        return np.asarray(jax.jit(program, compiler_options=QUICK_COMPILE)(q, rows, query_starts))

    truth = _dense_attention(*(np.asarray(array, np.float32) for array in (q, *kv)), starts[:2])
    every, last = np.arange(num_tokens - 1), np.array([20, 33])
    for rows, query_starts, max_query_len in ((every, starts, None), (last, np.arange(3), 1)):
        merged = run(rows, query_starts, max_query_len)
        assert merged.dtype == dtype
        np.testing.assert_allclose(merged.astype(np.float32), truth[rows], atol=atol)


def _dense_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, starts: Sequence[int]
) -> np.ndarray:
    """Computes causal attention of prompts in float32, with one KV head and a scale of 0.5.

    Args:
        starts: The index of each prompt's first token.
    """
    found = []
    for token, row in enumerate(q):
        first = max(start for start in starts if start <= token)
        seen = slice(first, token + 1)
        scores = 0.5 * row @ k[seen, 0].T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        found.append(weights / weights.sum(axis=1, keepdims=True) @ v[seen, 0])
    return np.stack(found)


def check_context_ranks(name: str, num_devices: int, num_ranks: int, num_parts: int) -> None:
    """Tokens are those of one device, and each rank has its own positions of every block.

    Args:
        num_parts: Size of the KV cache of an engine with one device, divided by the size of the
            part that each of the devices has.
    """
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    block_size = 8 * num_ranks
    # 128 tokens, of the 243 of all requests. The first 55 of two prompts are the same, and one is
    # computed in two chunks.
    settings = dataclasses.replace(
        SETTINGS, block_size=block_size, num_blocks=1 + 128 // block_size, arrival_gap=1
    )
    prompts = [[7, 8, 9, 7], list(range(5, 75)), list(range(5, 60)), [3] * 18]

    def run(mesh: jax.sharding.Mesh | None, num_ranks: int) -> tuple[RecordingRunner, RunResult]:
        options = {"mesh": mesh, "num_context_ranks": num_ranks, "load_format": "dummy"}
        runner = RecordingRunner(folder, block_size // num_ranks, **options, **LIMITS)
        params = [dataclasses.replace(param, max_tokens=24) for param in PARAMS]
        return runner, run_engine(runner, prompts, settings, sampling_params=params)

    alone, one = run(None, 1)
    split, many = run(find_mesh(num_devices), num_ranks)
    assert many.token_ids == one.token_ids
    assert many.num_cached_tokens == one.num_cached_tokens
    assert sum(one.num_cached_tokens) > 0
    assert many.num_preemptions == one.num_preemptions > 0
    for logits in zip(one.logits, many.logits, strict=True):
        np.testing.assert_allclose(*logits, atol=1e-3)
    check_cache_in_place(split)
    block_bytes = [runner.runner.memory_plan.block_bytes for runner in (alone, split)]
    assert block_bytes[0] == num_parts * block_bytes[1]
    whole, *_ = _tokens_of_blocks(alone, block_size)
    for device_idx, part in enumerate(_tokens_of_blocks(split, block_size // num_ranks)):
        own = whole[..., device_idx % num_ranks :: num_ranks, :]
        if part.shape[2] < own.shape[2]:  # of all KV heads, the device has one
            head_idx = device_idx // (num_devices // own.shape[2])
            own = own[:, :, head_idx : head_idx + 1]
        assert np.count_nonzero(own) > 0
        np.testing.assert_allclose(part, own, atol=1e-4)


def _tokens_of_blocks(recording: RecordingRunner, block_size: int) -> list[np.ndarray]:
    """The pages of each device: [num_rows, num_blocks, num_kv_heads, block_size, width]."""
    runner = recording.runner
    (_, place), *_ = runner.worker.programs._model.places[0]
    shards = [np.asarray(shard.data) for shard in runner.worker.kv_cache.addressable_shards]
    return [np.asarray(place.format.view(shard, block_size)) for shard in shards]
