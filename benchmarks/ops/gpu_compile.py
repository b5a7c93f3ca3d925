"""Compiles units ahead of time for a GPU that is only described, on a machine without one."""

import re
from pathlib import Path
from typing import Any

from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.ops.gpu_timing import compile_unit
from benchmarks.ops.gpu_units import AbsentError, Program, Unit

# Arrays below this size may be copied; a cache is larger.
_LARGE_COPY_BYTES = 2**26
_ITEMSIZES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "f8e4m3fn": 1}


class AheadCompiler:
    """Compiles for one GPU of a description, in the format that XLA writes for a device."""

    def __init__(self, target_config: Path) -> None:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target_config.read_text(), topology="1x1x1"
        )
        mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("device",))
        self._sharding = NamedSharding(mesh, PartitionSpec())

    def compile(self, unit: Unit) -> dict[str, Any]:
        """Compiles a unit; what is worth knowing of the outcome.

        Raises:
            AbsentError: It is no program of ours to compile.
        """
        if unit.program is None:
            raise AbsentError("it compiles nothing through JAX, or only small things")
        program: Program = unit.program()
        compiled = compile_unit(unit, program, unit.num_steps, self._sharding)
        text = compiled.as_text()
        memory = compiled.memory_analysis()
        return {
            "num_mosaic_kernels": text.count('custom_call_target="mosaic'),
            "num_hoisted": num_hoisted(text) if unit.num_steps > 1 else 0,
            "large_copies": large_copies(text),
            "temp_mib": memory.temp_size_in_bytes >> 20,
            "alias_mib": memory.alias_size_in_bytes >> 20,
            "argument_mib": memory.argument_size_in_bytes >> 20,
        }


def num_hoisted(hlo_text: str) -> int:
    """Mosaic kernels that a program with a loop runs outside of it: they would be timed once."""
    entry = hlo_text[hlo_text.index("\nENTRY ") :]
    return entry[: entry.index("\n}")].count('custom_call_target="mosaic')


def large_copies(hlo_text: str) -> list[str]:
    """Copies of arrays of a cache's size, as `bf16[2,4097,8,16,128]`.

    A loop's body and the entry computation are alike here: no program of ours needs one.
    """
    found = []
    for dtype, dims in re.findall(r"= (\w+)\[([\d,]*)\]\S* copy(?:-start)?\(", hlo_text):
        num_bytes = _ITEMSIZES.get(dtype, 8)
        for dim in dims.split(",") if dims else ():
            num_bytes *= int(dim)
        if num_bytes >= _LARGE_COPY_BYTES:
            found.append(f"{dtype}[{dims}]")
    return found
