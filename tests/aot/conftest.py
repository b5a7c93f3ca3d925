"""Compiles programs for H200s on a machine without one, through JAX's topology API.

A test takes the fixtures `h200` (or `four_h200s`) and `compile_for_h200`:

    def test_scatter_writes_in_place(h200, compile_for_h200):
        kv_cache = h200.array((1, 2 * 4096, 8, 16, 128), jnp.bfloat16)
        ...
        program = compile_for_h200(
            kv_scatter, kv_cache, k, k, slots, row, donate_argnums=0, target=h200.target
        )
        assert program.kernel_names == ["kv_scatter"]
        assert program.cache_copies(min_bytes=1 << 20) == []
        assert program.aliased_bytes >= kv_cache.size * 2
        assert [kernel.spill_bytes for kernel in program.ptxas] == [0]

`program.in_command_buffer` lists the kernels that are launched from a CUDA graph. XLA makes no
graph of fewer than five launches. For a small program, pass
`compiler_options={"xla_gpu_graph_min_graph_size": 1}`.

Keyword arguments that `compile_for_h200` does not know are static arguments of the function.
`CompiledProgram` describes everything that a test can check, and `KernelResources` the entries of
`program.ptxas`.

These tests need JAX 0.11.2 or newer, its wheels jax-cuda13-plugin and jax-cuda13-pjrt, and ptxas of
a CUDA 13 toolkit. `.ci/aot` makes such environments. Elsewhere the tests are skipped.
"""

import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from models.weight_rule import MODEL_AXIS
from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU
from pallas_kernels.target import Target, target_of
from tests.aot.compiled_program import CompiledProgram
from tests.aot.kernel_resources import KernelResources, read_kernel_resources
from tests.aot.thunk_sequence import read_thunks
from tests.paxkv.runner.greedy_draws import greedy_draws

_TARGET_CONFIG = Path(__file__).parent / "h200_target_config.textproto"
_PLUGIN = "jax_plugins.xla_cuda13"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Whole steps of deep models compile for minutes."""
    item.add_marker(pytest.mark.time_limit(1800))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the compile times that tests recorded as the property `compile_time`."""
    times = [
        text
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        if report.when == "call"
        for name, text in report.user_properties
        if name == "compile_time"
    ]
    if times:
        terminalreporter.section("compile times for an H200")
        for text in times:
            terminalreporter.line(text)


@dataclasses.dataclass(frozen=True)
class DescribedGpus:
    """Descriptions of H200s, for which programs can be compiled without a device."""

    mesh: Mesh  # all devices on one axis, MODEL_AXIS

    @property
    def target(self) -> Target:
        return target_of(self.mesh.devices.flat[0])

    def array(self, dims: tuple[int, ...], dtype: object, *spec: str | None) -> object:
        """An abstract array to compile with, split by `spec`; whole on every device without it."""
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


@pytest.fixture(scope="module", autouse=True)
def _leaves_sampler_out(request: pytest.FixtureRequest) -> Iterator[None]:
    """Bursts draw greedily, except in modules that set `COMPILES_SAMPLER`.

    The sampler takes half of the time to compile a burst of two layers.
    """
    if getattr(request.module, "COMPILES_SAMPLER", False):
        yield
        return
    with greedy_draws():
        yield


@pytest.fixture(scope="session")
def h200(_toolchain: "_Toolchain") -> DescribedGpus:
    """One H200. Skips the test if this machine cannot compile for it."""
    return _described_gpus("1x1x1")


@pytest.fixture(scope="session")
def four_h200s(_toolchain: "_Toolchain") -> DescribedGpus:
    """Four H200s of one machine. Skips the test if this machine cannot compile for them."""
    return _described_gpus("1x1x4")


def _described_gpus(topology: str) -> DescribedGpus:
    described = topologies.get_topology_desc(
        platform="cuda", target_config=_TARGET_CONFIG.read_text(), topology=topology
    )
    mesh = Mesh(np.array(described.devices), (MODEL_AXIS,), axis_types=(AxisType.Auto,))
    return DescribedGpus(mesh)


@pytest.fixture(scope="session")
def compile_for_h200(h200: DescribedGpus, _toolchain: "_Toolchain"):
    """Returns a function that compiles `function(*args)` as one program (`CompiledProgram`).

    Args (of the returned function):
        function, *args: The call to compile. `args` are pytrees of arrays, of which only the shape,
            dtype and sharding matter. An array without a sharding is whole on every device.
        mesh: The devices to compile for. None: one H200.
        donate_argnums, out_shardings: See `jax.jit`.
        compiler_options: Further options of XLA, see `jax.jit`.
        **static_kwargs: Bound to the function before it is traced.
    """

    def run(
        function,
        *args,
        mesh=None,
        donate_argnums=(),
        out_shardings=None,
        compiler_options=None,
        **static_kwargs,
    ) -> CompiledProgram:
        whole = NamedSharding(mesh or h200.mesh, PartitionSpec())

        def described(array):
            sharding = getattr(array, "sharding", None)
            is_on_mesh = isinstance(sharding, NamedSharding) and sharding.mesh == whole.mesh
            array = jax.ShapeDtypeStruct(np.shape(array), jax.dtypes.result_type(array))
            return array.update(sharding=sharding if is_on_mesh else whole)

        jitted = jax.jit(
            functools.partial(function, **static_kwargs),
            donate_argnums=donate_argnums,
            out_shardings=out_shardings,
        )
        return _toolchain.compile(
            lambda: jitted.lower(*jax.tree.map(described, args)), compiler_options or {}
        )

    return run


class _Toolchain:
    """XLA's and Mosaic's compilers for NVIDIA GPUs, with dumps of their work switched on."""

    def __init__(self, cuda_root: Path, mosaic_folder: Path) -> None:
        self._cuda_root = cuda_root
        # One folder for all programs, because Mosaic compiles a kernel only once per process.
        self._mosaic_folder = mosaic_folder
        self._kernels: dict[str, KernelResources] = {}

    def compile(
        self, lower: Callable[[], jax.stages.Lowered], options: dict[str, object]
    ) -> CompiledProgram:
        self._clear_mosaic_folder()  # an earlier program may have failed and left files
        with tempfile.TemporaryDirectory() as xla_folder:
            start_s = _cpu_s()
            lowered = lower()
            compiled = lowered.compile(
                compiler_options={
                    "xla_gpu_cuda_data_dir": str(self._cuda_root),
                    "xla_dump_to": xla_folder,
                    # By default, XLA tries several kinds of code for each product of matrices. It
                    # cannot compare their speed here, because there is no device.
                    "xla_gpu_autotune_level": 0,
                    **options,
                }
            )
            cpu_s = _cpu_s() - start_s
            program = CompiledProgram(
                text=compiled.as_text(),
                memory=compiled.memory_analysis(),
                thunks=read_thunks(Path(xla_folder)),
                kernels=self._kernels,
                num_lowered_kernels=lowered.as_text().count("custom_call @mosaic_gpu"),
                cpu_s=cpu_s,
            )
        self._read_new_kernels(program)
        return program

    def _read_new_kernels(self, program: CompiledProgram) -> None:
        """Matches the kernels that were compiled for a program with Mosaic's files about them.

        The files are named by the kernel and a counter, which no call shows. However, XLA compiles
        a program's kernels one by one, in the order in which the program launches them.
        """
        calls = program.mosaic_calls
        new = {c.kernel_hash: c.kernel for c in calls if c.kernel_hash not in self._kernels}
        files = sorted(
            self._mosaic_folder.glob("*.ptxas"), key=lambda file: file.stat().st_mtime_ns
        )
        resources = [read_kernel_resources(file) for file in files]
        if [kernel.name for kernel in resources] != list(new.values()):
            raise ValueError(
                f"the program calls the kernels {list(new.values())} that are new, but Mosaic "
                f"reports on {[kernel.name for kernel in resources]}"
            )
        self._kernels.update(zip(new, resources, strict=True))
        self._clear_mosaic_folder()  # the files take tens of megabytes per kernel

    def _clear_mosaic_folder(self) -> None:
        for file in self._mosaic_folder.iterdir():
            file.unlink()


def _cpu_s() -> float:
    """CPU seconds of this process and of the children that it waited for, such as ptxas."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.fixture(scope="session")
def _toolchain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Toolchain]:
    cuda_root = _find_cuda_root()
    if reason := _missing(cuda_root):
        pytest.skip(f"nothing can be compiled for an H200 here: {reason}")
    # XLA writes no dumps for a program from the cache on disk.
    was_enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    # On import, Mosaic sets MOSAIC_GPU_CUDA_ROOT to a toolkit that it finds itself. So the import
    # must come before the patch.
    importlib.import_module("jax.experimental.mosaic.gpu")
    mosaic_folder = tmp_path_factory.mktemp("mosaic")
    constraints = importlib.import_module("jax.experimental.mosaic.gpu.constraints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOSAIC_GPU_CUDA_ROOT", str(cuda_root))
        patch.setenv("MOSAIC_GPU_DUMP_TO", str(mosaic_folder))
        # Mosaic also dumps the constraints of layouts, which is slow. No test reads them.
        patch.setattr(constraints.ConstraintSystem, "__str__", object.__repr__)
        yield _Toolchain(cuda_root, mosaic_folder)
    jax.config.update("jax_enable_compilation_cache", was_enabled)
    compilation_cache.reset_cache()


def _find_cuda_root() -> Path | None:
    """Finds a CUDA 13 toolkit: from CUDA_HOME or CUDA_ROOT, PATH, a wheel, or /usr/local/cuda."""
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_ROOT") if name in os.environ]
    if on_path := shutil.which("ptxas"):
        roots.append(Path(on_path).resolve().parents[1])
    if wheel := _find_spec("nvidia.cu13"):
        roots += map(Path, wheel.submodule_search_locations or ())
    roots.append(Path("/usr/local/cuda"))
    return next((root for root in roots if _cuda_release(root / "bin" / "ptxas") >= 13), None)


def _cuda_release(ptxas: Path) -> int:
    """The toolkit's major version; 0 if there is no toolkit."""
    if not ptxas.is_file():
        return 0
    said = subprocess.run(
        [ptxas, "--version"], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    found = re.search(r"release (\d+)\.", said)
    return int(found[1]) if found else 0


def _missing(cuda_root: Path | None) -> str | None:
    if jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU:
        wanted = ".".join(map(str, MIN_JAX_FOR_MOSAIC_GPU))
        return f"it needs JAX {wanted} or newer, this is {jax.__version__}"
    if _find_spec(_PLUGIN) is None:
        return "the wheels jax-cuda13-plugin and jax-cuda13-pjrt are not installed"
    if cuda_root is None:
        return "no ptxas of a CUDA 13 toolkit on PATH, under CUDA_HOME, or in a wheel"
    return None


def _find_spec(module: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent package is not installed
        return None
