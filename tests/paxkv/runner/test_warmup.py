"""Every bucket is compiled before the engine is ready, and later compilations are counted."""

import jax
import pytest

from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.runner.bucketing import CopyShape, StepBuckets
from paxkv.runner.kv_cache_arrays import abstract_kv_cache, device_mesh
from paxkv.runner.warmup import StepPrograms
from tests.paxkv.runner.tiny_model import HEAD_DIM, NUM_HEADS, TinyModel


@pytest.fixture
def mesh():
    return device_mesh(jax.devices()[0])


@pytest.fixture
def kv_cache(mesh):
    spec = FullAttentionSpec(
        block_size=8, num_kv_heads=NUM_HEADS, head_size=HEAD_DIM, dtype="float32"
    )
    group = KVCacheGroupSpec(layer_names=("a", "b"), kv_cache_spec=spec)
    return abstract_kv_cache(KVCacheConfig(num_blocks=9, kv_cache_groups=(group,)), mesh)


def make_programs(mesh, max_num_batched_tokens=4):
    buckets = StepBuckets(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=2,
        num_groups=1,
        max_blocks_per_req=4,
    )
    model = TinyModel()
    return buckets, StepPrograms(
        model=model, params=model.params, buckets=buckets, max_num_seqs=2, mesh=mesh
    )


def test_warm_up_compiles_all_buckets_once(mesh, kv_cache, capsys):
    buckets, programs = make_programs(mesh)
    programs.warm_up(kv_cache, show_progress=True)
    shapes = (*buckets.shapes, *buckets.copy_shapes)
    first = {shape: programs.get(shape, kv_cache) for shape in shapes}
    programs.warm_up(kv_cache, show_progress=False)
    assert all(programs.get(shape, kv_cache) is first[shape] for shape in shapes)
    cache_bytes = 2 * kv_cache.k.size * kv_cache.k.dtype.itemsize
    for program in first.values():
        assert program.memory_analysis().alias_size_in_bytes >= cache_bytes  # it is donated
    assert programs.num_compiles_after_ready == 0
    out, err = capsys.readouterr()
    assert out == "" and "3/3" in err


def test_shape_that_the_warm_up_missed_is_counted_once(mesh, kv_cache, capsys):
    _, programs = make_programs(mesh, max_num_batched_tokens=2)
    programs.warm_up(kv_cache, show_progress=False)
    assert capsys.readouterr() == ("", "")
    other = make_programs(mesh)[0].largest
    assert programs.get(other, kv_cache) is programs.get(other, kv_cache)
    assert programs.num_compiles_after_ready == 1
    assert programs.get(CopyShape(num_copies=5), kv_cache) is not None
    assert programs.num_compiles_after_ready == 2
