"""Every bucket is compiled before the engine is ready, and later compilations are counted."""

import dataclasses
import threading
import time
from types import SimpleNamespace

import jax
import pytest

from models import Platform
from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.errors import ConfigError
from paxkv.runner.features.prompt_logprobs import PromptLogprobsVariant
from paxkv.runner.memory.device_mesh import device_mesh
from paxkv.runner.memory.kv_cache_arrays import abstract_kv_cache
from paxkv.runner.programs.warmup import StepPrograms
from paxkv.runner.shapes.program_shapes import (
    CopyShape,
    RowShape,
    SamplerShape,
    StepShape,
    TableShape,
)
from paxkv.runner.shapes.step_buckets import StepBuckets
from tests.paxkv.runner.tiny_model import HEAD_DIM, NUM_HEADS, VOCAB, TinyModel

TABLES = (TableShape(num_groups=1, max_blocks_per_req=4, block_size=8),)


@pytest.fixture
def mesh():
    return device_mesh(jax.devices()[0])


@pytest.fixture
def kv_cache(mesh):
    spec = FullAttentionSpec(
        block_size=8, num_kv_heads=NUM_HEADS, head_size=HEAD_DIM, dtype="float32"
    )
    group = KVCacheGroupSpec(layer_names=("a", "b"), kv_cache_spec=spec)
    config = KVCacheConfig(num_blocks=9, kv_cache_groups=(group,))
    return abstract_kv_cache(config, mesh, Platform(), "float32")


def make_programs(mesh, max_num_batched_tokens=4):
    buckets = StepBuckets(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=2,
        max_decode_burst=3,
        tables=TABLES,
        max_model_len=4 * 8,
        feature_variants=[[PromptLogprobsVariant(num_logits=0)]],
    )
    model = TinyModel()
    return buckets, StepPrograms(
        model=model, params=model.params, buckets=buckets, max_num_seqs=2, mesh=mesh
    )


@pytest.fixture
def compile_nothing(monkeypatch):
    """A new object stands for each compiled program; returns the shapes that were compiled."""
    compiled = []

    def finish(programs, shape, lowered):
        compiled.append(shape)
        return object()

    monkeypatch.setattr(StepPrograms, "_lower", lambda programs, shape, kv_cache: None)
    monkeypatch.setattr(StepPrograms, "_finish", finish)
    return compiled


def test_warm_up_compiles_all_buckets_once(mesh, kv_cache, capsys, compile_nothing):
    buckets, programs = make_programs(mesh)
    programs.warm_up(kv_cache, show_progress=True)
    shapes = buckets.largest_first
    first = {shape: programs.get(shape, kv_cache) for shape in shapes}
    programs.warm_up(kv_cache, show_progress=False)
    assert all(programs.get(shape, kv_cache) is first[shape] for shape in shapes)
    assert sorted(map(repr, compile_nothing)) == sorted(map(repr, shapes))
    assert programs.num_compiles_after_ready == 0
    out, err = capsys.readouterr()
    assert out == "" and "7/7" in err


def test_programs_overwrite_the_cache_and_the_logits(one_group):
    programs, kv_cache = one_group.runner.worker.programs, one_group.runner.worker.kv_cache
    cache_bytes = kv_cache.size * kv_cache.dtype.itemsize
    logits_bytes = programs.buckets.sampler_shape.num_rows * VOCAB * 4
    for shape in programs.buckets.largest_first:
        alias_bytes = programs.get(shape, kv_cache).memory_analysis().alias_size_in_bytes
        if not isinstance(shape, (SamplerShape, RowShape)):
            assert alias_bytes >= cache_bytes  # it is donated
        if isinstance(shape, (SamplerShape, StepShape)):
            assert alias_bytes >= logits_bytes + cache_bytes * isinstance(shape, StepShape)
    assert programs.num_compiles_after_ready == 0


def test_shape_that_the_warm_up_missed_is_counted_once(mesh, kv_cache, capsys, compile_nothing):
    _, programs = make_programs(mesh, max_num_batched_tokens=2)
    programs.warm_up(kv_cache, show_progress=False)
    assert capsys.readouterr() == ("", "")
    other = make_programs(mesh)[0].step_shapes[-1]
    assert programs.get(other, kv_cache) is programs.get(other, kv_cache)
    assert compile_nothing.count(other) == programs.num_compiles_after_ready == 1


def test_program_is_compiled_without_a_warm_up_and_then_kept(mesh, kv_cache):
    _, programs = make_programs(mesh)
    shape = CopyShape(num_copies=5)
    program = programs.get(shape, kv_cache)
    assert program.memory_analysis().alias_size_in_bytes >= kv_cache.size * 4
    assert programs.get(shape, kv_cache) is program
    assert (programs.num_compiles, programs.num_compiles_after_ready) == (1, 0)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_as_many_programs_compile_at_a_time_as_the_platform_says(
    mesh, kv_cache, monkeypatch, num_threads
):
    monkeypatch.setattr(Platform, "num_compile_threads", lambda platform: num_threads)
    buckets, programs = make_programs(mesh)
    memory = SimpleNamespace(temp_size_in_bytes=3, output_size_in_bytes=2, alias_size_in_bytes=1)
    compiled = SimpleNamespace(memory_analysis=lambda: memory)
    num_now, most = 0, 0
    num_lowered, most_lowered = 0, 0
    changed = threading.Condition()

    def lower(shape, kv_cache):
        nonlocal num_lowered, most_lowered
        with changed:
            num_lowered += 1
            most_lowered = max(most_lowered, num_lowered)

    def finish(shape, lowered):
        """Waits until this many run; one more would have time to begin."""
        nonlocal num_now, most, num_lowered
        with changed:
            num_now += 1
            most = max(most, num_now)
            changed.notify_all()
            changed.wait_for(lambda: most >= num_threads, timeout=60)
        time.sleep(0.02)
        with changed:
            num_now -= 1
            num_lowered -= 1
        return compiled

    monkeypatch.setattr(programs, "_lower", lower)
    monkeypatch.setattr(programs, "_finish", finish)
    assert programs.measure_temp_bytes(kv_cache) == 3 + 2 - 1
    assert most == num_threads
    most = 0
    assert programs.warm_up(kv_cache, show_progress=False) == len(buckets.largest_first)
    assert most == most_lowered == num_threads


def test_start_that_fails_compiles_no_other_program(mesh, kv_cache, monkeypatch):
    monkeypatch.setattr(Platform, "num_compile_threads", lambda platform: 1)
    buckets, programs = make_programs(mesh, max_num_batched_tokens=64)
    lowered, begun = [], []

    def finish(shape, _):
        begun.append(shape)
        raise ConfigError("the disk is full")

    monkeypatch.setattr(programs, "_lower", lambda shape, kv_cache: lowered.append(shape))
    monkeypatch.setattr(programs, "_finish", finish)
    with pytest.raises(ConfigError, match="disk is full"):
        programs.warm_up(kv_cache, show_progress=False)
    assert lowered == begun == [buckets.largest_first[0]]


@dataclasses.dataclass(frozen=True)
class ReportingPlatform(Platform):
    """Returns its arguments as the compiler's options."""

    def compiler_options(self, dtypes, *, batch_invariant=False):
        return {"of": f"{sorted(dtypes)}, {batch_invariant}"}


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_program_of_an_engine_is_compiled_with_the_options_of_its_platform(batch_invariant):
    asked = []
    buckets = StepBuckets(
        max_num_batched_tokens=64,
        max_num_seqs=8,
        max_decode_burst=8,
        max_model_len=64,
        tables=TABLES,
        batch_invariant=batch_invariant,
    )
    model = TinyModel()
    model.platform = ReportingPlatform()
    programs = StepPrograms(
        model=model,
        params=model.params,
        buckets=buckets,
        max_num_seqs=8,
        mesh=device_mesh(jax.devices("cpu")[0]),
    )
    lowered = SimpleNamespace(compile=asked.append)
    for shape in buckets.largest_first:
        programs._finish(shape, lowered)
    assert asked == [{"of": f"['float32'], {batch_invariant}"}] * len(buckets.largest_first)
