"""Whole steps of small models, as programs that can be compiled without weights or a cache."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import KernelSettings, LoadedModel, Platform, load_model
from models.decoder_spec import with_drafter
from models.loading.kernel_encoder import KernelEncoder
from models.loading.load_head import load_eagle3_head
from models.loading.loaded_draft_model import LoadedDraftModel
from models.loading.loaded_head import LoadedHead
from models.loading.loaded_module import LoadedModule
from models.platforms import GPU
from models.weight_rule import MODEL_AXIS
from paxkv.runner.features.target_hidden import TargetHiddenVariant
from paxkv.runner.memory.kv_cache_arrays import abstract_kv_cache, kv_cache_dtype
from paxkv.runner.memory.kv_cache_groups import groups_of_spec
from paxkv.runner.programs.burst import make_burst
from paxkv.runner.programs.drafting_burst import make_drafting_burst
from paxkv.runner.programs.step import make_step
from paxkv.runner.sampling.row_state import abstract_row_state
from paxkv.runner.shapes.packed_layout import PackedLayout
from paxkv.runner.shapes.program_shapes import (
    BurstShape,
    DrafterShape,
    NgramShape,
    RowShape,
    StepShape,
)
from tests.models.drafters.eagle3_checkpoints import write_eagle3_head
from tests.oracles.make_checkpoint import write_random_checkpoint

NUM_LAYERS = 2
BLOCK_SIZE = 16
# So many that a row of the cache is larger than every other array: a copy of a row cannot hide.
NUM_BLOCKS = 16_384
NUM_REQS = 64
MAX_MODEL_LEN = 8_192
MAX_BURST_STEPS = 8
NUM_DRAFTS = 3

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
    """A function to compile and its arguments. Argument 1 is the cache."""

    function: Callable[..., object]
    args: tuple[object, ...]
    donate_argnums: tuple[int, ...]
    mesh: Mesh
    cache: jax.ShapeDtypeStruct  # the pages
    model: LoadedModel

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on one device."""
        return _bytes_on_one_device(self.cache)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the smallest matrix of weights, on one device."""
        params = self.args[0]
        return min(_bytes_on_one_device(param) for param in params if param.ndim > 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's keys on one device: the smallest part of the cache that a bug copies."""
        return self.cache_bytes // self.cache.shape[0] // 2


def _bytes_on_one_device(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def each_step(
    steps: Iterable[tuple[object, ...]], slow: Collection[tuple[object, ...]] = ()
) -> pytest.MarkDecorator:
    """The parameter `step`; the name of a case is its parts.

    Args:
        slow: Steps that run with `pytest -m slow` only.
    """
    params = [pytest.param(step, marks=pytest.mark.slow if step in slow else ()) for step in steps]
    return pytest.mark.parametrize("step", params, ids=lambda step: "_".join(map(str, step)))


def build_model(
    folder: Path, name: str, *, num_layers: int = NUM_LAYERS, platform: Platform | None = None
) -> LoadedModel:
    """One of `MODELS`, in bfloat16, as it would be loaded for a platform, by default a GPU."""
    checkpoint = write_random_checkpoint(
        folder / f"{name}_{num_layers}", **{**MODELS[name], "num_layers": num_layers}
    )
    return load_model(checkpoint, dtype="bfloat16", platform=platform or GPU())


def build_head(folder: Path, model: LoadedModel) -> LoadedHead:
    """A head of one layer for the model "llama", in the model's dtype."""
    folder = folder / "head"
    write_eagle3_head(
        folder,
        vocab_size=_COMMON["vocab_size"],
        draft_vocab_size=_COMMON["vocab_size"] // 2,
        layer_ids=[1, 2],
        hidden_size=_COMMON["hidden_size"],
        intermediate_size=_COMMON["intermediate_size"],
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    return load_eagle3_head(model, folder, encoder=KernelEncoder(platform=model.platform))


def mixed_step(
    model: LoadedModel,
    mesh: Mesh,
    *,
    num_tokens: int,
    num_blocks: int = NUM_BLOCKS,
    num_context_ranks: int = 1,
) -> StepProgram:
    """The step that the runner compiles for a bucket: any mix of prompts, chunks and decodes."""
    shape = StepShape(
        num_tokens=num_tokens, num_reqs=NUM_REQS, num_logits=NUM_REQS, logits="last", tables=()
    )
    return _step_program(model, mesh, shape, num_blocks, num_context_ranks)


def burst(
    model: LoadedModel,
    mesh: Mesh,
    *,
    max_steps: int = MAX_BURST_STEPS,
    num_blocks: int = NUM_BLOCKS,
    num_context_ranks: int = 1,
    implementation: str | None = None,
) -> StepProgram:
    """The burst that the runner compiles for a bucket. With one step, it contains no loop."""
    shape = BurstShape(
        max_steps=max_steps,
        num_reqs=NUM_REQS,
        tables=(),
        max_model_len=MAX_MODEL_LEN,
        chunk_rows=NUM_REQS,
    )
    return _step_program(
        *(model, mesh, shape, num_blocks, num_context_ranks), implementation=implementation
    )


def verifying_step(model: LoadedModel, mesh: Mesh, *, num_blocks: int = NUM_BLOCKS) -> StepProgram:
    """The step that verifies `NUM_DRAFTS` drafts of each request."""
    num_tokens = NUM_REQS * (1 + NUM_DRAFTS)
    shape = StepShape(
        num_tokens=num_tokens,
        num_reqs=NUM_REQS,
        num_logits=num_tokens,
        logits="indices",
        max_draws=1 + NUM_DRAFTS,
        tables=(),
    )
    return _step_program(model, mesh, shape, num_blocks)


def drafting_burst(model: LoadedModel, mesh: Mesh, *, num_blocks: int = NUM_BLOCKS) -> StepProgram:
    """The burst that finds and verifies `NUM_DRAFTS` drafts of each request in a step."""
    shape = BurstShape(
        max_steps=MAX_BURST_STEPS,
        num_reqs=NUM_REQS,
        tables=(),
        max_model_len=MAX_MODEL_LEN,
        chunk_rows=NUM_REQS * (1 + NUM_DRAFTS),
        drafts=NgramShape(num_drafts=NUM_DRAFTS, shortest=2, longest=4),
    )
    return _step_program(model, mesh, shape, num_blocks)


def head_burst(
    model: LoadedModel, head: LoadedHead, mesh: Mesh, *, num_blocks: int = NUM_BLOCKS
) -> StepProgram:
    """The burst in which a head proposes `NUM_DRAFTS` drafts of each request in a step."""
    num_tokens = NUM_REQS * (1 + NUM_DRAFTS)
    hidden = TargetHiddenVariant(
        num_tokens=num_tokens,
        hidden_size=model.config.hidden_size,
        dtype=model.dtype,
        taps=head.taps,
        num_kept_rows=NUM_REQS,
        head_size=head.config.hidden_size,
    )
    shape = BurstShape(
        max_steps=MAX_BURST_STEPS,
        num_reqs=NUM_REQS,
        tables=(),
        max_model_len=MAX_MODEL_LEN,
        chunk_rows=num_tokens,
        drafts=DrafterShape(num_drafts=NUM_DRAFTS),
        features=(hidden,),
    )
    return _step_program(model, mesh, shape, num_blocks, head=head)


def draft_model_burst(
    model: LoadedModel, mesh: Mesh, *, num_blocks: int = NUM_BLOCKS
) -> StepProgram:
    """The burst in which the model proposes `NUM_DRAFTS` drafts of each request for itself."""
    shape = BurstShape(
        max_steps=MAX_BURST_STEPS,
        num_reqs=NUM_REQS,
        tables=(),
        max_model_len=MAX_MODEL_LEN,
        chunk_rows=NUM_REQS * (1 + NUM_DRAFTS),
        drafts=DrafterShape(num_drafts=NUM_DRAFTS),
    )
    return _step_program(
        model, mesh, shape, num_blocks, head=LoadedDraftModel.of_model(model, model)
    )


def _step_program(
    model: LoadedModel,
    mesh: Mesh,
    shape: StepShape | BurstShape,
    num_blocks: int,
    num_context_ranks: int = 1,
    head: LoadedHead | LoadedDraftModel | None = None,
    implementation: str | None = None,
) -> StepProgram:
    """Makes the program of a shape. The caller leaves `tables` of the shape empty."""
    kv_dtype = kv_cache_dtype(model.dtype, model.platform)
    spec = model.config.spec(kv_dtype)
    if head is not None:
        spec = with_drafter(spec, head.config.spec(kv_dtype))
    spec = spec.on_each_of(mesh.size)
    groups = groups_of_spec(
        spec,
        block_size=BLOCK_SIZE,
        head_dim_step=model.platform.head_dim_step,
        num_context_ranks=num_context_ranks,
    )
    shape = dataclasses.replace(shape, tables=groups.tables(MAX_MODEL_LEN))
    kernels = KernelSettings.for_mesh(
        mesh, num_context_ranks=num_context_ranks, implementation=implementation
    )
    places, num_layers = groups.places(spec), model.config.num_layers
    model = _with_own_heads(model, mesh.size)
    model = model.with_kernels(kernels).with_places(places[:num_layers])
    params = _abstract_params(model, mesh)
    cache = abstract_kv_cache(groups.config(num_blocks), mesh, model.platform, kv_dtype)
    whole = NamedSharding(mesh, PartitionSpec())
    packed, prev_tokens = (
        jax.ShapeDtypeStruct((length,), jnp.int32, sharding=whole)
        for length in (PackedLayout(shape).num_words, NUM_REQS)
    )
    vocab_size = model.config.vocab_size
    # Each device has the logits of its rows of the vocabulary head.
    by_vocab = NamedSharding(mesh, PartitionSpec(None, MODEL_AXIS))
    num_rows = shape.num_logits if isinstance(shape, StepShape) else shape.num_tokens
    logits = jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.float32, sharding=by_vocab)
    args, donate_argnums = (params, cache, packed, prev_tokens, logits), (1, 4)
    slot_blocks = tuple(
        jax.ShapeDtypeStruct(table.slot_shape(NUM_REQS).dims, jnp.int32, sharding=whole)
        for table in shape.tables
        if table.is_state
    )
    if isinstance(shape, BurstShape):
        make = make_burst if shape.drafts is None else make_drafting_burst
        if head is not None:
            head = head.with_kernels(kernels).with_places(places[num_layers:])
            make = functools.partial(make, head=head)
        function = make(model, shape)
        row_shape = RowShape(num_rows=NUM_REQS, max_model_len=MAX_MODEL_LEN)
        args = (*args, abstract_row_state(row_shape, vocab_size, whole))
        donate_argnums = (1, 4, 5, 7)
    else:
        function = make_step(model, shape)
    donated = tuple(
        {
            name: jax.ShapeDtypeStruct(array.dims, array.dtype, sharding=whole)
            for name, array in variant.arrays().items()
        }
        for variant in shape.features
    )
    head_params = () if head is None else (_abstract_params(head, mesh),)
    args = (*args, ({},) * len(donated), donated, slot_blocks, *head_params)
    return StepProgram(
        function=function,
        args=args,
        donate_argnums=donate_argnums,
        mesh=mesh,
        cache=cache,
        model=model,
    )


def _with_own_heads(model: LoadedModel, num_devices: int) -> LoadedModel:
    """The model as it is loaded for a mesh: each device has its own heads of recurrent layers."""
    rules, params = dict(model.weight_rules), []
    for name, value in model.parameters.items():
        rule = rules.get(name)
        if rule is None or rule.num_devices == rule.parts_on(num_devices):
            params += jax.tree.leaves(value)
            continue
        rules[name] = rule.on_mesh(value.shape, num_devices, splits_kv_heads=True)
        shape = rules[name].shape_on_mesh(value.shape)
        params.append(jax.ShapeDtypeStruct(shape, value.dtype))
    return dataclasses.replace(model, weight_rules=rules, params=tuple(params))


def _abstract_params(module: LoadedModule, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(
        jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=NamedSharding(mesh, spec))
        for param, spec in zip(module.params, module.param_specs, strict=True)
    )
