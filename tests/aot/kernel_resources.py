"""Reads the resources of a compiled GPU kernel: registers, spills, shared memory, CTAs per SM."""

import dataclasses
import math
import re
from pathlib import Path

# Limits of one streaming multiprocessor of compute capability 9.0.
# Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
_REGISTERS_PER_SM = 65_536
_SHARED_BYTES_PER_SM = 233_472
_THREADS_PER_SM = 2_048
_THREADS_PER_WARP = 32
_REGISTERS_PER_WARP_STEP = 256  # a warp gets its registers in multiples of this number
_RESERVED_SHARED_BYTES = 1_024  # in every CTA, for the system
_SHARED_BYTES_STEP = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelResources:
    """One Mosaic GPU kernel, as it would be launched."""

    name: str  # the `kernel_name=` of `plgpu.kernel`
    registers: int  # per thread; with `set_max_registers`, the number at launch
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    barriers: int  # named barriers ("bar.sync"); mbarriers live in shared memory
    num_threads: int  # per CTA
    shared_bytes: int  # per CTA: the launch's dynamic memory, and the static memory of ptxas
    # Unusual remarks of ptxas, such as a serialized wgmma or an ignored setmaxnreg.
    remarks: tuple[str, ...]

    @property
    def spill_bytes(self) -> int:
        return self.spill_store_bytes + self.spill_load_bytes

    @property
    def ctas_per_sm(self) -> int:
        """How many CTAs fit one streaming multiprocessor of an H200 at once (computed)."""
        warps = math.ceil(self.num_threads / _THREADS_PER_WARP)
        registers_of_warp = _round_up(self.registers * _THREADS_PER_WARP, _REGISTERS_PER_WARP_STEP)
        shared = _round_up(self.shared_bytes + _RESERVED_SHARED_BYTES, _SHARED_BYTES_STEP)
        return min(
            _REGISTERS_PER_SM // registers_of_warp // warps,
            _SHARED_BYTES_PER_SM // shared,
            _THREADS_PER_SM // (warps * _THREADS_PER_WARP),
        )


def read_kernel_resources(ptxas_file: Path) -> KernelResources:
    """Reads the files that Mosaic wrote for one kernel into the folder of MOSAIC_GPU_DUMP_TO.

    Raises:
        ValueError: A file does not look as expected: JAX or ptxas changed their output.
    """
    ptxas = ptxas_file.read_text()
    ptx = ptxas_file.with_suffix(".ptx").read_text()
    # The text of the module before and after each pass. After folding, the launch's constants have
    # names like "%c2056_i32".
    module = ptxas_file.with_suffix(".mlir-passes.log").read_text()
    static_shared = re.search(r"(\d+) bytes smem", ptxas)
    named_barriers = re.search(r"used (\d+) barriers", ptxas)
    return KernelResources(
        name=_first(r"entry function '(.*)_mosaic_gpu_kernel'", ptxas),
        registers=int(_first(r"Used (\d+) registers", ptxas)),
        stack_bytes=int(_first(r"(\d+) bytes stack frame", ptxas)),
        spill_store_bytes=int(_first(r"(\d+) bytes spill stores", ptxas)),
        spill_load_bytes=int(_first(r"(\d+) bytes spill loads", ptxas)),
        barriers=int(named_barriers[1]) if named_barriers else 0,
        num_threads=math.prod(map(int, _first(r"\.maxntid ([\d, ]+)", ptx).split(","))),
        shared_bytes=int(_first(r"dynamic_shared_memory_size %\w*?c(\d+)_i32", module))
        + (int(static_shared[1]) if static_shared else 0),
        remarks=_remarks(ptxas),
    )


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"{pattern!r} not found in {text[:2000]!r}")
    return found[1]


# C7519: the products in a loop add to the same registers, so ptxas puts one fence before the loop.
_USUAL = re.compile(
    r"bytes gmem|Compiling entry function|Function properties|bytes stack frame|Used \d+ registers"
    r"|Compile time|C7519"
)


def _remarks(ptxas: str) -> tuple[str, ...]:
    lines = (line.strip() for line in ptxas.splitlines())
    return tuple(line for line in lines if line and not _USUAL.search(line))


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
