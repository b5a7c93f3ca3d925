"""Compiles programs for TPU chips on a machine without one, with libtpu and JAX's topology API.

The installed libtpu must be the one that this JAX is made for, or a newer one.
`pip install "jax[tpu]"` installs it. An older libtpu cannot read Mosaic's output ("unknown
attribute code").
"""

import dataclasses
import importlib.metadata
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from pallas_kernels.target import Target, target_of
from tests.aot.hlo_text import Instruction, parse_instructions

# Instructions without a buffer of their own: they refer to, or run, other instructions.
_WITHOUT_BUFFER = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "call",
    "constant",
}
# Instructions whose computations are counted as one instruction.
_WITH_BODY = {"fusion", "call-start", "async-start"}
# The first parts of an asynchronous call. Its last part has the result.
_PARTS_OF_CALL = ("-start", "-update")
# `rules.after` reads one number of an array.
_FEW_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuProgram:
    """A program compiled for one TPU chip."""

    text: str  # the compiled, scheduled HLO
    memory: Any  # `jax.stages.Compiled.memory_analysis()`

    @property
    def mosaic_kernels(self) -> list[str]:
        """The `name=` of each Mosaic call, in the order of the text. One in a loop counts once."""
        calls = [i for i in parse_instructions(self.text) if _is_mosaic(i)]
        return [call.name.split(".")[0] for call in calls]

    @property
    def num_sorts(self) -> int:
        """The number of sorts in the program. A sort in a loop counts once."""
        return sum(i.opcode == "sort" for i in parse_instructions(self.text))

    def buffers_of(self, num_bytes: int) -> list[str]:
        """Lists instructions that make an array of this size or larger, such as copies of a cache.

        A Mosaic call that writes in place uses its operand's buffer and is not listed.
        """
        instructions = parse_instructions(self.text)
        inside_fusions = {name for i in instructions if i.opcode == "fusion" for name in i.called}
        return [
            instruction.line[:200]
            for instruction in instructions
            if max(instruction.array_bytes, default=0) >= num_bytes
            and instruction.opcode not in _WITHOUT_BUFFER
            and instruction.computation not in inside_fusions
            and not (_is_mosaic(instruction) and "output_to_operand_aliasing" in instruction.line)
        ]

    def bytes_moved(self, min_bytes: int, max_bytes: int) -> int:
        """Bytes that the program reads and writes of arrays of a range of sizes.

        The cache must be larger. Of the cache, what gathers read and scatters write is counted.
        """
        instructions = parse_instructions(self.text)
        sizes = {i.name: i.array_bytes for i in instructions}
        # A fusion counts as a whole, and so does an asynchronous call of a gather.
        inside = {name for i in instructions if i.opcode in _WITH_BODY for name in i.called}

        def counted(num_bytes: tuple[int, ...]) -> int:
            return sum(size for size in num_bytes if min_bytes <= size <= max_bytes)

        total = 0
        for instruction in instructions:
            opcode, results = instruction.opcode, instruction.array_bytes
            if opcode in _WITHOUT_BUFFER or opcode.endswith(_PARTS_OF_CALL):
                continue
            if instruction.computation in inside or max(results, default=0) <= _FEW_BYTES:
                continue
            operands = [sizes[name] for name in dict.fromkeys(instruction.operands)]
            of_cache = [max(operand, default=0) > max_bytes for operand in operands]
            read = sum(counted(operand) for operand in operands)
            if opcode.endswith("-done"):
                # The operand holds the source and the result of "-start". Its size is not that of
                # the read: a copy reads what it writes. Of a slice, only the result is counted.
                read = counted(results) if opcode == "copy-done" else 0
            total += counted(results) + read
            if any(of_cache):
                is_write = max(results) > max_bytes
                total += read if is_write else counted(results)
        return total


def _is_mosaic(instruction: Instruction) -> bool:
    return 'custom_call_target="tpu_custom_call"' in instruction.line


@dataclasses.dataclass(frozen=True)
class DescribedTpu:
    """A description of a TPU chip, for which programs can be compiled without the chip."""

    device: jax.Device

    @property
    def target(self) -> Target:
        return target_of(self.device)

    def array(self, dims: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        """An abstract array on the chip, to compile with."""
        sharding = jax.sharding.SingleDeviceSharding(self.device)
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    def compile(self, function, *args, donate_argnums: tuple[int, ...] = ()) -> TpuProgram:
        """Compiles `function(*args)` as one program."""
        chip = jax.sharding.AbstractDevice(
            device_kind=self.device.device_kind,
            num_cores=self.device.num_cores,
            platform=self.device.platform,
        )
        # To lower a Mosaic kernel, JAX asks which chip it is for. Without the mesh, it would find
        # the CPU.
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.sharding.AbstractMesh((1,), ("chip",), axis_types=auto, abstract_device=chip)
        with jax.sharding.use_abstract_mesh(mesh):
            lowered = jax.jit(function, donate_argnums=donate_argnums).lower(*args)
        compiled = lowered.compile()
        return TpuProgram(text=compiled.as_text(), memory=compiled.memory_analysis())


def missing_for_tpu() -> str | None:
    """Why programs cannot be compiled for a TPU here; None if they can.

    `.ci/aot` fails if this returns a reason.
    """
    try:
        installed = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return "nothing can be compiled for a TPU: libtpu is not installed"
    wanted = [
        found[1]
        for line in importlib.metadata.requires("jax") or []
        if (found := re.match(r"libtpu==([\d.]+?)(?:\.\*)?\s*;", line))
    ]
    if wanted and _numbers(installed) < _numbers(wanted[0]):
        return (
            f"nothing can be compiled for a TPU: JAX {jax.__version__} needs libtpu {wanted[0]} "
            f"or newer, this is {installed}"
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def describe_tpu(topology: str) -> DescribedTpu:
    """The first chip of a topology such as "v5e:2x2"."""
    return DescribedTpu(describe_tpus(topology)[0])


def describe_tpus(topology: str) -> list[jax.Device]:
    """All chips of a topology."""
    # By default, libtpu asks the cloud's metadata server for the machine's type, and waits.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # By default, libtpu lets only one process of a machine use the TPU. Here there is no TPU.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
