"""Whole steps of small models, as programs that can be compiled without weights or a cache."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import ForwardBatch, KernelSettings, KVCache, LoadedModel, kv_cache_layers, load_model
from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.runner.bucketing import StepShape
from paxkv.runner.kv_cache_arrays import abstract_kv_cache, kv_cache_dtype
from paxkv.runner.kv_cache_groups import groups_of_layers
from paxkv.runner.packed_layout import PackedLayout
from paxkv.runner.step import forward, make_step, unpack_batch
from tests.oracles.make_checkpoint import write_random_checkpoint

NUM_LAYERS = 2
BLOCK_SIZE = 16
# One row of the cache is larger than every other array, so that no copy of it can hide.
NUM_BLOCKS = 16_384
NUM_REQS = 64
MAX_MODEL_LEN = 8_192
MAX_BURST_STEPS = 8

_COMMON = {
    "num_layers": NUM_LAYERS,
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 4_096,
    "max_position_embeddings": MAX_MODEL_LEN,
}
_GEMMA = {
    **_COMMON,
    "family": "gemma3_text",
    "num_q_heads": 8,
    "num_kv_heads": 4,
    "tie": True,
    "extra_config": {
        "sliding_window": 1_024,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 256,
    },
}
# Name -> arguments of `write_random_checkpoint`.
MODELS: dict[str, dict[str, object]] = {
    "llama": {**_COMMON, "num_q_heads": 8, "num_kv_heads": 4, "head_dim": 128},
    "llama_mha": {**_COMMON, "num_q_heads": 8, "num_kv_heads": 8, "head_dim": 128},
    "gemma3_128": {**_GEMMA, "head_dim": 128},
    "gemma3_256": {**_GEMMA, "head_dim": 256},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepProgram:
    """A function to compile and what to call it with; argument 1 is the cache, to be donated."""

    function: Callable[..., object]
    args: tuple[object, ...]
    mesh: Mesh
    cache: KVCache  # abstract
    model: LoadedModel

    @property
    def cache_bytes(self) -> int:
        """On one device."""
        return sum(_bytes_on_one_device(array) for array in (self.cache.k, self.cache.v))

    @property
    def row_bytes(self) -> int:
        """One row of K on one device: the smallest part of the cache that a bug would copy."""
        return _bytes_on_one_device(self.cache.k) // self.cache.k.shape[0]


def _bytes_on_one_device(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def build_model(folder: Path, name: str) -> LoadedModel:
    """One of `MODELS`, in bfloat16."""
    return load_model(write_random_checkpoint(folder / name, **MODELS[name]), dtype="bfloat16")


def mixed_step(model: LoadedModel, mesh: Mesh, *, num_tokens: int) -> StepProgram:
    """The step that the runner compiles for a bucket: any mix of prompts, chunks and decodes."""
    return _step_program(
        model, mesh, num_tokens, lambda model, shape: make_step(model, shape), num_others=0
    )


def decode_step(model: LoadedModel, mesh: Mesh) -> StepProgram:
    """A step of one token a request, which says so; greedy."""

    def make(model: LoadedModel, shape: StepShape) -> Callable[..., object]:
        def step(params, kv_cache, packed, prev_tokens):
            batch = _decode_batch(shape, packed, prev_tokens)
            logits, kv_cache = forward(model, params, kv_cache, batch)
            return kv_cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)

        return step

    return _step_program(model, mesh, NUM_REQS, make)


def burst(model: LoadedModel, mesh: Mesh) -> StepProgram:
    """Decode steps in one program, as many as its last argument says, each fed by the last."""

    def make(model: LoadedModel, shape: StepShape) -> Callable[..., object]:
        def run(params, kv_cache, packed, prev_tokens, num_steps):
            first = _decode_batch(shape, packed, prev_tokens)

            def body(state):
                step_idx, batch, kv_cache, tokens = state
                logits, kv_cache = forward(model, params, kv_cache, batch)
                next_ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
                batch = dataclasses.replace(
                    batch,
                    token_ids=next_ids,
                    positions=batch.positions + 1,
                    seq_lens=batch.seq_lens + (batch.seq_lens > 0),
                )
                return step_idx + 1, batch, kv_cache, tokens.at[step_idx].set(next_ids)

            tokens = jnp.zeros((MAX_BURST_STEPS, NUM_REQS), jnp.int32)
            state = (jnp.int32(0), first, kv_cache, tokens)
            state = lax.while_loop(lambda state: state[0] < num_steps, body, state)
            return state[2], state[3]

        return run

    return _step_program(model, mesh, NUM_REQS, make, num_others=1)


def _decode_batch(shape: StepShape, packed: jax.Array, prev_tokens: jax.Array) -> ForwardBatch:
    batch = unpack_batch(PackedLayout(shape).unpack(packed), prev_tokens)
    return dataclasses.replace(batch, max_query_len=1)


def _step_program(
    model: LoadedModel,
    mesh: Mesh,
    num_tokens: int,
    make: Callable[[LoadedModel, StepShape], Callable[..., object]],
    *,
    num_others: int = 0,
) -> StepProgram:
    """Args: num_others: int32 scalars after the arguments that every step has."""
    cache_config = _cache_config(model)
    shape = StepShape(
        num_tokens=num_tokens,
        num_reqs=NUM_REQS,
        num_logits=NUM_REQS,
        num_groups=len(cache_config.kv_cache_groups),
        max_blocks_per_req=MAX_MODEL_LEN // BLOCK_SIZE,
    )
    model = model.with_kernels(KernelSettings.for_mesh(mesh))
    params = tuple(
        jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=NamedSharding(mesh, spec))
        for param, spec in zip(model.params, model.param_specs, strict=True)
    )
    cache = abstract_kv_cache(cache_config, mesh)
    int_dims = [(PackedLayout(shape).num_words,), (NUM_REQS,), *[()] * num_others]
    whole = NamedSharding(mesh, PartitionSpec())
    ints = [jax.ShapeDtypeStruct(dims, jnp.int32, sharding=whole) for dims in int_dims]
    return StepProgram(
        function=make(model, shape),
        args=(params, cache, *ints),
        mesh=mesh,
        cache=cache,
        model=model,
    )


def _cache_config(model: LoadedModel) -> KVCacheConfig:
    dtype = kv_cache_dtype(model.params[0].dtype.name, "gpu")
    groups = groups_of_layers(kv_cache_layers(model.config), block_size=BLOCK_SIZE, dtype=dtype)
    return groups.config(NUM_BLOCKS)
