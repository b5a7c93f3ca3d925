"""`CompiledProgram`: the properties that tests check of a program compiled for H200s."""

import dataclasses
import functools
from typing import Any

from tests.aot.hlo_text import Instruction, MosaicCall, mosaic_calls, parse_instructions
from tests.aot.kernel_resources import KernelResources
from tests.aot.thunk_sequence import Thunk

_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Instructions without a buffer of their own. Their result is in an operand's buffer, or is counted
# inside the computation that they run.
_WITHOUT_BUFFER = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "opt-barrier",
    "after-all",
    "async-start",
    "async-update",
    "async-done",
    "copy-done",
    "fusion-done",
    "all-reduce-done",
    "all-gather-done",
    "collective-permute-done",
}
_UPDATES_IN_PLACE = {"dynamic-update-slice", "scatter"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One exchange between devices."""

    kind: str  # "all-reduce", "all-gather", ...
    num_bytes: int  # of the largest array that it takes or makes, on one device
    op_name: str  # its place in the traced function
    computation: str  # of the compiled text


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A program compiled for one or more H200s. All sizes are for one device."""

    text: str  # the compiled, scheduled HLO
    memory: Any  # `jax.stages.Compiled.memory_analysis()`
    thunks: list[Thunk]  # everything that the program launches, and the containers around it
    kernels: dict[str, KernelResources]  # by their hashes
    num_lowered_kernels: int  # how many kernels JAX lowered; equal kernels count separately
    cpu_s: float  # CPU time to trace, lower and compile it, of all threads and child processes

    @functools.cached_property
    def instructions(self) -> list[Instruction]:
        return parse_instructions(self.text)

    @functools.cached_property
    def mosaic_calls(self) -> list[MosaicCall]:
        """The calls of Mosaic kernels, in the order of launching. A call in a loop counts once."""
        launched = [thunk.instruction for thunk in self.thunks]
        calls = mosaic_calls(self.instructions)
        return sorted(calls, key=lambda call: launched.index(self._launcher_of[call.instruction]))

    @property
    def kernel_names(self) -> list[str]:
        """The Mosaic kernels called, by their `kernel_name=`, in the order of `mosaic_calls`."""
        return [call.kernel for call in self.mosaic_calls]

    @property
    def num_kernels(self) -> int:
        """How many different Mosaic kernels the program contains. Each is compiled once."""
        return len({call.kernel_hash for call in self.mosaic_calls})

    @property
    def ptxas(self) -> list[KernelResources]:
        """The resources of the kernel of each Mosaic call, in the order of `kernel_names`."""
        return [self.kernels[call.kernel_hash] for call in self.mosaic_calls]

    @property
    def aliased_bytes(self) -> int:
        """Bytes of outputs that are in the buffers of donated inputs."""
        return self.memory.alias_size_in_bytes

    @property
    def temp_bytes(self) -> int:
        """Temporary memory of the program."""
        return self.memory.temp_size_in_bytes

    def cache_copies(self, min_bytes: int) -> list[str]:
        """Lists every instruction that fills a fresh buffer of at least `min_bytes`.

        Examples are a copy, a transpose, a select between an old and a new cache, a gather of the
        cache, and a fusion of such instructions. Writes in place are not listed: a scatter or a
        dynamic update slice, alone or as the root of a fusion, and a kernel whose result is in its
        operand's buffer. Choose a cache larger than the program's other arrays.
        """
        return [
            f"{instruction.computation}: {instruction.line[:200]}"
            for instruction, _ in self.fresh_buffers(min_bytes)
        ]

    def fresh_buffers(self, min_bytes: int) -> list[tuple[Instruction, int]]:
        """The instructions that `cache_copies` lists, with the bytes of their buffers."""
        with_bytes = [(i, self._fresh_bytes(i)) for i in self._launched]
        return [(i, num_bytes) for i, num_bytes in with_bytes if num_bytes >= min_bytes]

    @property
    def num_branches(self) -> list[int]:
        """The number of branches of each conditional."""
        return [len(i.called) for i in self.instructions if i.opcode == "conditional"]

    def concatenations(self, min_bytes: int) -> list[str]:
        """Lists every concatenation with a result of at least `min_bytes`, also inside fusions."""
        return [
            f"{instruction.computation}: {instruction.line[:200]}"
            for instruction in self.instructions
            if instruction.opcode == "concatenate" and max(instruction.array_bytes) >= min_bytes
        ]

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """All exchanges between devices; one inside a loop is listed once."""
        return [
            Collective(
                kind=kind,
                num_bytes=max(instruction.array_bytes),
                op_name=instruction.op_name,
                computation=instruction.computation,
            )
            for instruction in self._launched
            if (kind := instruction.opcode.removesuffix("-start")) in _COLLECTIVES
        ]

    @property
    def in_command_buffer(self) -> list[str]:
        """The Mosaic kernels that are launched from inside a command buffer (a CUDA graph)."""
        inside = {t.instruction for t in self.thunks if t.is_in_command_buffer}
        return [c.kernel for c in self.mosaic_calls if self._launcher_of[c.instruction] in inside]

    @property
    def loops_in_command_buffer(self) -> list[str]:
        """The instructions of the while loops that are, as a whole, in a command buffer."""
        return [t.instruction for t in self.thunks if t.is_loop_in_command_buffer]

    @functools.cached_property
    def _by_computation(self) -> dict[str, list[Instruction]]:
        computations: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            computations.setdefault(instruction.computation, []).append(instruction)
        return computations

    @functools.cached_property
    def _callers(self) -> dict[str, Instruction]:
        """Computation -> the fusion or reduction that contains it. Others are not in the dict."""
        return {
            called: instruction
            for instruction in self.instructions
            if instruction.opcode not in ("while", "conditional", "call")
            for called in instruction.called
        }

    @functools.cached_property
    def _launched(self) -> list[Instruction]:
        """The instructions that run on their own: those outside of fusions and reductions."""
        return [i for i in self.instructions if i.computation not in self._callers]

    @functools.cached_property
    def _launcher_of(self) -> dict[str, str]:
        """Instruction -> the instruction that is launched for it: itself, or the fusion around it.

        XLA puts a kernel whose operand is a slice into one fusion with the slice.
        """
        launchers = {}
        for instruction in self.instructions:
            launcher = instruction
            while launcher.computation in self._callers:
                launcher = self._callers[launcher.computation]
            launchers[instruction.name] = launcher.name
        return launchers

    def _fresh_bytes(self, instruction: Instruction) -> int:
        """Bytes of the largest array that an instruction makes in a buffer of its own."""
        if instruction.opcode in _WITHOUT_BUFFER | _UPDATES_IN_PLACE:
            return 0
        if "output_to_operand_aliasing" in instruction.line:
            return 0
        if not instruction.opcode.startswith("fusion"):
            return max(instruction.array_bytes, default=0)
        (called,) = instruction.called
        return max((self._fresh_bytes(result) for result in self._results_of(called)), default=0)

    def _results_of(self, computation: str) -> list[Instruction]:
        """The instructions that make the results of a fusion; skips tuples and bitcasts."""
        instructions = self._by_computation[computation]
        by_name = {i.name: i for i in instructions}
        pending = [i for i in instructions if i.is_root]
        results = []
        while pending:
            instruction = pending.pop()
            if instruction.opcode in ("tuple", "bitcast", "get-tuple-element"):
                pending += [by_name[name] for name in instruction.operands]
            else:
                results.append(instruction)
        return results
