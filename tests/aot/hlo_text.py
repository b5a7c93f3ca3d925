"""Reads the text of a compiled XLA program: instructions, their sizes, and the Mosaic kernels."""

import dataclasses
import functools
import re

_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction of the program."""

    name: str
    opcode: str
    computation: str
    is_root: bool
    array_bytes: tuple[int, ...]  # of each array of the result, in order
    operands: tuple[str, ...]  # names
    called: tuple[str, ...]  # computations that it runs
    line: str

    @property
    def op_name(self) -> str:
        """The instruction's place in the traced function, such as "jit(step)/layer/dot_general"."""
        found = re.search(r'op_name="([^"]*)"', self.line)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MosaicCall:
    """One call of a Mosaic kernel in the program."""

    kernel: str  # the `kernel_name=` of `plgpu.kernel`
    kernel_hash: str  # equal for equal kernels, which are compiled once
    instruction: str


def parse_instructions(text: str) -> list[Instruction]:
    """All instructions of all computations, in the order of the text."""
    instructions = []
    computation = ""
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            computation = found["name"]
        elif computation and (found := _INSTRUCTION.match(line)):
            instructions.append(_instruction(found, computation, line))
        elif line.startswith("}"):
            computation = ""
    return instructions


def _instruction(found: re.Match[str], computation: str, line: str) -> Instruction:
    shape, rest = _split_shape(found["rest"])
    opcode, _, rest = rest.partition("(")
    arguments = rest[: _closing(rest)]
    # Attributes contain whole kernels. The names of called computations come before those.
    attributes = rest[len(arguments) :].split("backend_config=")[0].split("metadata=")[0]
    called = re.findall(
        r"(?:calls|body|condition|to_apply|(?:true|false)_computation)=%?([\w.\-]+)", attributes
    )
    for group in re.findall(r"(?:branch_computations|called_computations)={([^}]*)}", attributes):
        called += re.findall(r"%?([\w.\-]+)", group)
    return Instruction(
        name=found["name"],
        opcode=opcode.strip(),
        computation=computation,
        is_root=bool(found["root"]),
        array_bytes=_array_bytes(shape),
        operands=tuple(re.findall(r"%([\w.\-]+)", arguments)),
        called=tuple(called),
        line=line.strip(),
    )


def _split_shape(rest: str) -> tuple[str, str]:
    """Example: "(f32[2], s32[]) while(%x), ..." -> "(f32[2], s32[])", "while(%x), ..."."""
    if rest.startswith("("):
        end = _closing(rest[1:]) + 2
        return rest[:end], rest[end:].lstrip()
    shape, _, rest = rest.partition(" ")
    return shape, rest


def _closing(text: str) -> int:
    """The index in `text` of the parenthesis that closes the one just before `text`."""
    depth = 1
    for idx, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return idx
    raise ValueError(f"a parenthesis is not closed in {text[:200]!r}")


@functools.cache
def _array_bytes(shape: str) -> tuple[int, ...]:
    without_layouts = re.sub(r"\{[^}]*\}", "", shape)
    sizes = []
    for dtype, dims in _ARRAY.findall(without_layouts):
        bits = 8 if dtype.startswith("f8") else _BITS[dtype]
        for dim in filter(None, dims.split(",")):
            bits *= int(dim)
        sizes.append(bits // 8)
    return tuple(sizes)


def mosaic_calls(instructions: list[Instruction]) -> list[MosaicCall]:
    """The calls of Mosaic GPU kernels, in the order of the text.

    Raises:
        ValueError: A kernel's name cannot be found: Mosaic changed its format.
    """
    return [
        MosaicCall(
            kernel=_kernel_name(_quoted("module", instruction.line)),
            kernel_hash=_quoted("kernel_hash", instruction.line),
            instruction=instruction.name,
        )
        for instruction in instructions
        if 'custom_call_target="mosaic_gpu' in instruction.line
    ]


def _quoted(attribute: str, line: str) -> str:
    found = re.search(rf'{attribute} = "((?:[^"\\]|\\.)*)"', line)
    if found is None:
        raise ValueError(f"no attribute {attribute!r} in {line[:300]!r}")
    return found[1]


def _kernel_name(escaped_module: str) -> str:
    """The kernel's name among a serialized module's strings, each of which ends with a zero byte.

    Example: the kernel "decode" names the module "decode" and its function "decode_mosaic_gpu".
    """
    strings = set(_unescape(escaped_module).split("\0"))
    names = {s.removesuffix("_mosaic_gpu") for s in strings if s.endswith("_mosaic_gpu")}
    if len(names & strings) != 1:
        raise ValueError(f"one kernel's name wanted, got {names} of which {names & strings}")
    return (names & strings).pop()


_ESCAPE = re.compile(r"\\([0-9A-Fa-f]{2}|.)", re.DOTALL)


def _unescape(text: str) -> str:
    r"""Undoes LLVM's escapes, with one character per byte: "a\00\\" becomes three characters."""

    def character(found: re.Match[str]) -> str:
        code = found[1]
        return chr(int(code, 16)) if len(code) == 2 else {"n": "\n", "t": "\t"}.get(code, code)

    return _ESCAPE.sub(character, text)
