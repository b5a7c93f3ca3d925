"""Stored programs compute what compiled ones do; programs that do not fit are refused."""

import dataclasses
import errno
import json
import os
import re
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from models import Platform
from paxkv.config.runner_config import RunnerConfig
from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.errors import ConfigError
from paxkv.runner.features.prompt_logprobs import PromptLogprobsVariant
from paxkv.runner.memory.device_mesh import device_mesh
from paxkv.runner.memory.kv_cache_arrays import abstract_kv_cache, allocate_kv_cache
from paxkv.runner.programs import program_store
from paxkv.runner.programs.program_store import (
    CompiledPrograms,
    NewCompiledPrograms,
    ProgramCache,
    choose_store,
    user_cache_folder,
    without_jax_cache,
)
from paxkv.runner.programs.warmup import StepPrograms
from paxkv.runner.sampling.row_state import allocate_row_state, num_row_words, vocab_words
from paxkv.runner.shapes.program_shapes import CopyShape, RowShape, TableShape
from paxkv.runner.shapes.sampling_row import ROW, step_row_width
from paxkv.runner.shapes.step_buckets import StepBuckets
from tests.paxkv.runner.tiny_model import HEAD_DIM, NUM_HEADS, VOCAB, TinyModel

NUM_BLOCKS = 9
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
IDENTITY = {"jax": "1.2", "device": "abacus", "model's num_layers": "3"}
TABLE = TableShape(num_groups=1, max_blocks_per_req=4, block_size=8)
DIMENSIONS = {
    "max_num_batched_tokens": 4,
    "max_num_seqs": 1,
    "max_decode_burst": 2,
    "tables": (TABLE,),
    "max_model_len": 32,
    "feature_variants": [[PromptLogprobsVariant(num_logits=0)]],
}
SHAPES = StepBuckets(**DIMENSIONS).largest_first  # steps, a burst, the sampler and block copies


class BucketsWithoutModel(StepBuckets):
    """Programs that compile quickly. `tests/paxkv/test_compile.py` loads steps and bursts, too."""

    @property
    def largest_first(self):
        return (self.sampler_shape, self.row_shape, *self.copy_shapes)

    largest = largest_first


BUCKETS = BucketsWithoutModel(**DIMENSIONS)
COMPILED = BUCKETS.largest_first


@pytest.fixture(scope="module")
def mesh():
    return device_mesh(jax.devices()[0])


@pytest.fixture(scope="module")
def cache_config():
    spec = FullAttentionSpec(
        block_size=8, num_kv_heads=NUM_HEADS, head_size=HEAD_DIM, dtype="float32"
    )
    group = KVCacheGroupSpec(layer_names=("a", "b"), kv_cache_spec=spec)
    return KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_groups=(group,))


@pytest.fixture(scope="module")
def start(mesh, cache_config):
    """Does what an engine's start does with a store; returns its programs."""

    def start(store) -> StepPrograms:
        model = TinyModel()
        programs = StepPrograms(
            model=model,
            params=model.params,
            buckets=BUCKETS,
            max_num_seqs=1,
            mesh=mesh,
            store=store,
        )
        programs.abstract_cache = abstract_kv_cache(cache_config, mesh, Platform(), "float32")
        programs.warm_up(programs.abstract_cache, show_progress=False)
        return programs

    return start


@pytest.fixture(scope="module")
def run(mesh, cache_config):
    """Runs every program once, on the same inputs; returns all that they return, as NumPy."""

    def run(programs: StepPrograms) -> list[np.ndarray]:
        arrays_np = []
        for shape in COMPILED:
            kv_cache = allocate_kv_cache(cache_config, mesh, Platform(), "float32")
            program = programs.get(shape, kv_cache)
            state = allocate_row_state(
                BUCKETS.row_shape, VOCAB, NamedSharding(mesh, PartitionSpec())
            )
            if isinstance(shape, RowShape):
                row_np = np.zeros(num_row_words(shape.max_model_len, VOCAB), np.int32)
                arguments = (state, row_np)
            elif isinstance(shape, CopyShape):
                arguments = (kv_cache, np.zeros((2, shape.num_copies), np.int32))
            else:
                sampling_np = np.ones((1, step_row_width(1)), np.int32)
                sampling_np[0, ROW] = 0
                mask_np = np.zeros((1, 1 + vocab_words(VOCAB)), np.int32)
                arguments = (jnp.ones((1, VOCAB)), state, sampling_np, mask_np)
            result = program(*arguments)
            assert kv_cache.is_deleted() == isinstance(shape, CopyShape), "the cache is donated"
            arrays_np += jax.device_get(jax.tree.leaves(result))
        return arrays_np

    return run


@pytest.fixture
def num_compilations():
    """Counts XLA's compilations from here on."""
    events = []

    def listen(event: str, duration: float, **kwargs: object) -> None:
        if event == COMPILE_EVENT:
            events.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    yield lambda: len(events)
    monitoring.unregister_event_duration_listener(listen)


class WatchedStore(NewCompiledPrograms):
    """Records whether JAX's own cache took part in compiling."""

    def open(self, *arguments):
        folder = super().open(*arguments)
        self.had_jax_cache = []
        save = folder.save

        def watched_save(*arguments):
            self.had_jax_cache.append(jax.config.jax_enable_compilation_cache)
            save(*arguments)

        folder.save = watched_save
        return folder


@pytest.fixture(scope="module")
def kept(tmp_path_factory, start, run):
    """A folder of compiled programs, and their results before they were saved."""
    out = tmp_path_factory.mktemp("kept") / "out"
    store = WatchedStore(out)
    programs = start(store)
    assert (programs.num_loaded, programs.num_compiles) == (0, len(COMPILED))
    assert store.had_jax_cache == [False] * len(COMPILED)
    return out, run(programs)


def copy_into_cache(kept: Path, root: Path) -> None:
    """As if a start with the cache had compiled these programs."""
    identity = json.loads((kept / "programs.json").read_text())["identity"]
    folder = ProgramCache(root).open(identity, COMPILED, jax.devices())
    shutil.copytree(kept, folder.path, dirs_exist_ok=True)


def assert_equal(got_np: list[np.ndarray], wanted_np: list[np.ndarray]) -> None:
    for got, wanted in zip(got_np, wanted_np, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_second_start_compiles_nothing_and_computes_the_same(
    tmp_path, kept, start, run, num_compilations
):
    out, expected_np = kept
    copy_into_cache(out, tmp_path)
    programs = start(ProgramCache(tmp_path))
    assert (programs.num_loaded, programs.num_compiles) == (len(COMPILED), 0)
    assert num_compilations() == 0
    assert_equal(run(programs), expected_np)
    assert programs.num_compiles_after_ready == 0
    jax.jit(lambda x: x + 1).lower(1).compile()
    assert num_compilations() == 1, "the counter counts"


def test_cache_stores_missing_programs(tmp_path, kept, start, caplog):
    copy_into_cache(kept[0], tmp_path)
    store = ProgramCache(tmp_path)
    (copy,) = tmp_path.rglob("CopyShape*.program")
    copy.write_bytes(copy.read_bytes()[:-1] + b"x")
    assert start(store).num_compiles == 1
    assert f"{copy} cannot be read: it is damaged. It is compiled again." in caplog.text
    copy.unlink()
    assert start(store).num_compiles == 1
    assert start(store).num_compiles == 0


def test_compiled_programs_are_complete_and_compute_the_same(kept, start, run, num_compilations):
    out, expected_np = kept
    assert CompiledPrograms(out).num_blocks == NUM_BLOCKS
    assert CompiledPrograms(out).max_model_len == DIMENSIONS["max_model_len"]
    programs = start(CompiledPrograms(out))
    assert (programs.num_loaded, programs.num_compiles) == (len(COMPILED), 0)
    assert num_compilations() == 0
    assert_equal(run(programs), expected_np)


def test_memory_that_programs_need_is_known_without_compiling_them_again(tmp_path, kept, start):
    copy_into_cache(kept[0], tmp_path)
    programs = start(ProgramCache(tmp_path))
    kv_cache = programs.abstract_cache
    found = [programs.get(shape, kv_cache).memory_analysis() for shape in COMPILED]
    # Results that overwrite arguments need no memory of their own.
    by_program = [
        m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes for m in found
    ]
    assert programs.measure_temp_bytes(kv_cache) == max(by_program) > 0
    assert programs.num_compiles == 0
    (copy,) = tmp_path.rglob("CopyShape*.program")
    copy.unlink()
    programs.measure_temp_bytes(kv_cache)
    assert programs.num_compiles == 1 and copy.is_file()


def test_program_that_a_backend_cannot_load_or_serialize_is_compiled(
    tmp_path, kept, start, caplog, monkeypatch
):
    def fail(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: sorry")

    copy_into_cache(kept[0], tmp_path)
    folder = CompiledPrograms(kept[0])
    monkeypatch.setattr(serialize_executable, "deserialize_and_load", fail)
    with pytest.raises(ConfigError, match="cannot be read: JaxRuntimeError: UNIMPLEMENTED"):
        start(folder)
    # The smallest alone: compiling the others would take long.
    monkeypatch.setattr(serialize_executable, "serialize", fail)
    (copy,) = [shape for shape in SHAPES if hasattr(shape, "num_copies")]
    folder = ProgramCache(tmp_path).open(IDENTITY, SHAPES, jax.devices())
    folder.save(copy, None)
    assert "cannot be kept" in caplog.text and "The next start compiles" in caplog.text
    assert folder.load(copy) is None
    caplog.clear()
    folder.save(copy, None)
    # Once: there may be a hundred programs.
    assert not caplog.records
    folder = NewCompiledPrograms(tmp_path / "new").open(IDENTITY, SHAPES, jax.devices())
    with pytest.raises(ConfigError, match="cannot be kept.*UNIMPLEMENTED"):
        folder.save(copy, None)


@pytest.mark.parametrize("damage", ["No such file", "it is damaged"])
def test_incomplete_compiled_programs_are_refused(tmp_path, kept, start, damage):
    out = Path(shutil.copytree(kept[0], tmp_path / "out"))
    (copy,) = out.glob("CopyShape*.program")
    if damage == "it is damaged":
        copy.write_bytes(copy.read_bytes()[:-1])
    else:
        copy.unlink()
    message = rf"{re.escape(str(copy))} cannot be read: {damage}.*python -m paxkv.compile --out"
    with pytest.raises(ConfigError, match=message):
        start(CompiledPrograms(out))


def test_program_that_jax_has_cached_is_stored_completely(tmp_path):
    """A program from JAX's cache can be saved again, but then fails when called."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    folder = ProgramCache(tmp_path).open(IDENTITY, SHAPES, jax.devices())

    def compile_sort():
        return jax.jit(lambda x: jnp.sort(jnp.tanh(x @ x), axis=0)).lower(x).compile()

    x = jnp.ones((8, 8))
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        expected_np = jax.device_get(compile_sort()(x))
        assert list((tmp_path / "jax").iterdir()), "JAX has cached it"
        with without_jax_cache():
            folder.save(SHAPES[0], compile_sort())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    np.testing.assert_array_equal(jax.device_get(folder.load(SHAPES[0])(x)), expected_np)


def test_jax_cache_is_enabled_again_afterwards():
    was_enabled = jax.config.jax_enable_compilation_cache
    with pytest.raises(KeyError), without_jax_cache():
        assert not jax.config.jax_enable_compilation_cache
        raise KeyError
    assert jax.config.jax_enable_compilation_cache == was_enabled


@pytest.mark.parametrize("name", sorted(IDENTITY))
def test_compiled_programs_of_another_identity_are_refused_by_name(tmp_path, name):
    NewCompiledPrograms(tmp_path).open(IDENTITY, SHAPES, jax.devices())
    CompiledPrograms(tmp_path).open(IDENTITY, SHAPES, jax.devices())
    other = {**IDENTITY, name: "another"}
    message = f"{name}: compiled with '{IDENTITY[name]}', now 'another'. Start with"
    with pytest.raises(ConfigError, match=re.escape(message)):
        CompiledPrograms(tmp_path).open(other, SHAPES, jax.devices())


@pytest.mark.parametrize(
    ("dimension", "value", "message"),
    [
        ("max_num_batched_tokens", 24, "StepShape's num_tokens: compiled with 4, now also 24, 16"),
        ("max_decode_burst", 5, "BurstShape's max_steps: compiled with 2, now also 5"),
        (
            "tables",
            (dataclasses.replace(TABLE, max_blocks_per_req=3),),
            r"StepShape's max_blocks_per_req: compiled with \[4\], now also \[3\]",
        ),
        (
            "tables",
            (TABLE, dataclasses.replace(TABLE, block_size=16)),
            r"BurstShape's num_groups: compiled with \[1\], now also \[1, 1\]; .*"
            r"BurstShape's block_size: compiled with \[8\], now also \[8, 16\]",
        ),
        (
            "feature_variants",
            [[PromptLogprobsVariant(num_logits=9)]],
            "StepShape's features: compiled with .*=0.*, now also .*PromptLogprobsVariant.*=9",
        ),
    ],
    ids=["tokens", "burst", "columns", "block sizes", "features"],
)
def test_compiled_programs_of_other_shapes_are_refused_by_dimension(
    tmp_path, dimension, value, message
):
    NewCompiledPrograms(tmp_path).open(IDENTITY, SHAPES, jax.devices())
    # The same settings are not refused.
    same = StepBuckets(**DIMENSIONS).largest_first
    CompiledPrograms(tmp_path).open(IDENTITY, same, jax.devices())
    shapes = StepBuckets(**DIMENSIONS | {dimension: value}).largest_first
    with pytest.raises(ConfigError, match=message):
        CompiledPrograms(tmp_path).open(IDENTITY, shapes, jax.devices())


def test_missing_combinations_of_known_sizes_are_named(tmp_path):
    first = SHAPES[0]
    held = [dataclasses.replace(first, num_tokens=8), dataclasses.replace(first, num_reqs=9)]
    NewCompiledPrograms(tmp_path).open(IDENTITY, held, jax.devices())
    wanted = dataclasses.replace(first, num_tokens=8, num_reqs=9)
    with pytest.raises(ConfigError, match="'num_reqs': 9.* is missing"):
        CompiledPrograms(tmp_path).open(IDENTITY, [wanted], jax.devices())


@pytest.mark.parametrize("index", [None, "", "[]", '{"identity": {}}'])
def test_folder_without_compiled_programs_is_refused(tmp_path, index):
    if index is not None:
        (tmp_path / "programs.json").write_text(index)
    with pytest.raises(ConfigError, match="holds no compiled programs.*python -m paxkv.compile"):
        CompiledPrograms(tmp_path)


def test_compiling_replaces_its_own_files_and_no_others(tmp_path):
    out = tmp_path / "out"
    NewCompiledPrograms(out).open(IDENTITY, SHAPES, jax.devices())
    (out / "StepShape-0.program").write_bytes(b"old")
    NewCompiledPrograms(out).open({**IDENTITY, "jax": "2"}, SHAPES, jax.devices())
    assert [path.name for path in out.iterdir()] == ["programs.json"]
    (out / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="holds other files, 'letter.txt' for example"):
        NewCompiledPrograms(out)
    with pytest.raises(ConfigError, match="cannot be written to"):
        NewCompiledPrograms(out / "letter.txt")


def test_folder_that_turns_out_not_to_be_writable_is_reported(tmp_path):
    store = NewCompiledPrograms(tmp_path / "out")
    # Where the index is to go; rights would not keep root from writing.
    (tmp_path / "out" / "programs.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be written to .*/out: .* Choose another folder"):
        store.open(IDENTITY, SHAPES, jax.devices())


@pytest.mark.skipif(os.name != "posix", reason="rights are POSIX's")
def test_folder_that_everybody_may_write_to_is_refused(tmp_path):
    out = tmp_path / "out"
    NewCompiledPrograms(out).open(IDENTITY, SHAPES, jax.devices())
    out.chmod(0o777)
    with pytest.raises(ConfigError, match="cannot be trusted.*drwxrwxrwx.*chmod o-w"):
        CompiledPrograms(out)
    with pytest.raises(ConfigError, match="cannot be trusted"):
        NewCompiledPrograms(out)
    with pytest.raises(ConfigError, match="cannot be trusted"):
        ProgramCache(out).open(IDENTITY, SHAPES, jax.devices())


def test_cache_that_cannot_be_written_is_warned_of_at_once(tmp_path, caplog, jax_cache_dir):
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / "cache"
    jax_cache_dir(str(root))
    for config in (RunnerConfig(compilation_cache_dir=str(root)), RunnerConfig()):
        caplog.clear()
        store = choose_store(config)
        (message,) = caplog.messages
        assert f"compilation_cache_dir={root}" in message and "Every start compiles" in message
        assert store.open(IDENTITY, SHAPES, jax.devices()) is None
        # Once.
        assert caplog.messages == [message]


def test_full_disk_is_found_before_anything_is_compiled(tmp_path, caplog, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = ProgramCache(tmp_path).open(IDENTITY, SHAPES, jax.devices()).path
    monkeypatch.setattr(os, "fsync", refuse)
    store = choose_store(RunnerConfig(compilation_cache_dir=str(tmp_path)))
    (message,) = caplog.messages
    assert "No space left on device" in message and "Make room" in message
    # What an earlier start left is still found.
    folder = store.open(IDENTITY, SHAPES, jax.devices())
    assert folder.path == path
    monkeypatch.setattr(program_store, "_write", refuse)
    monkeypatch.setattr(serialize_executable, "serialize", lambda program: ())
    folder.save(SHAPES[0], None)
    assert caplog.messages == [message]
    # Nothing of the attempt is left.
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="rights are POSIX's")
def test_folder_that_cannot_be_trusted_is_refused_at_once(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="cannot be trusted"):
        choose_store(RunnerConfig(compilation_cache_dir=str(tmp_path)))


def test_programs_unused_for_a_month_are_deleted(tmp_path):
    store = ProgramCache(tmp_path)
    old = store.open(IDENTITY, SHAPES, jax.devices()).path
    (old / "StepShape-0.program").write_bytes(b"")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    # Somebody's programs, compiled ahead, in a folder beside the cache's.
    delivered = tmp_path / "programs"
    NewCompiledPrograms(delivered).open(IDENTITY, SHAPES, jax.devices())
    for path in (old, foreign, delivered):
        make_old(path)
    used = store.open({**IDENTITY, "jax": "2"}, SHAPES, jax.devices()).path
    store.open({**IDENTITY, "jax": "3"}, SHAPES, jax.devices())
    assert not old.exists()
    assert used.exists() and foreign.exists()
    assert CompiledPrograms(delivered).open(IDENTITY, SHAPES, jax.devices()).path == delivered


def test_only_the_latest_folders_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(program_store, "_MAX_IDENTITIES", 3)
    store = ProgramCache(tmp_path)
    paths = []
    for version in range(5):
        paths.append(store.open({**IDENTITY, "jax": str(version)}, SHAPES, jax.devices()).path)
        os.utime(paths[-1], (time.time() - 100 + version,) * 2)
    assert [path.exists() for path in paths] == [False, False, True, True, True]


def make_old(path: Path) -> None:
    """Makes a folder look unused for a month."""
    long_ago = time.time() - 31 * 24 * 3600
    os.utime(path, (long_ago, long_ago))


def test_restart_after_a_long_run_finds_its_programs(tmp_path):
    store = ProgramCache(tmp_path)
    path = store.open(IDENTITY, SHAPES, jax.devices()).path
    (path / "StepShape-0.program").write_bytes(b"")
    make_old(path)
    store.open(IDENTITY, SHAPES, jax.devices())
    assert (path / "StepShape-0.program").exists()
    # Its age starts from zero again.
    store.open({**IDENTITY, "jax": "2"}, SHAPES, jax.devices())
    assert path.exists()


def test_read_only_cache_is_read(tmp_path, monkeypatch):
    path = ProgramCache(tmp_path).open(IDENTITY, SHAPES, jax.devices()).path

    def refuse(*args, **kwargs):
        raise PermissionError("Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    folder = ProgramCache(tmp_path).open(IDENTITY, SHAPES, jax.devices())
    assert folder is not None and folder.path == path


def root_of(config: RunnerConfig) -> Path | None:
    store = choose_store(config)
    return None if store is None else store._root


@pytest.fixture
def jax_cache_dir():
    """Sets JAX's own folder, and puts it back."""
    before = jax.config.jax_compilation_cache_dir
    yield lambda path: jax.config.update("jax_compilation_cache_dir", path)
    jax.config.update("jax_compilation_cache_dir", before)


def test_settings_choose_the_store(tmp_path, monkeypatch, jax_cache_dir):
    NewCompiledPrograms(tmp_path / "out").open(IDENTITY, SHAPES, jax.devices())
    assert choose_store(RunnerConfig(enable_compilation_cache=False)) is None
    assert root_of(RunnerConfig(compilation_cache_dir=str(tmp_path))) == tmp_path
    out = str(tmp_path / "out")
    assert isinstance(choose_store(RunnerConfig(compiled_dir=out)), CompiledPrograms)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    jax_cache_dir(str(tmp_path / "jax"))
    assert root_of(RunnerConfig()) == tmp_path / "jax" / "paxkv"
    for elsewhere in (None, "gs://bucket/cache"):
        jax_cache_dir(elsewhere)
        assert root_of(RunnerConfig()) == tmp_path / "mine" / "paxkv" / "compiled"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert user_cache_folder() == tmp_path / ".cache" / "paxkv" / "compiled"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_folder() == tmp_path / ".cache" / "paxkv" / "compiled"


def test_user_without_a_home_folder_gets_no_store(monkeypatch, caplog, jax_cache_dir):
    jax_cache_dir(None)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    # As it answers for a user that the system does not know.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert choose_store(RunnerConfig()) is None
    assert "no home folder" in caplog.text and "compilation_cache_dir" in caplog.text
