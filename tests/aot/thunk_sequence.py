"""Reads XLA's list of thunks: everything that a compiled GPU program launches."""

import dataclasses
import re
from pathlib import Path

# "    015: kCustomCall   [prev=013 (2) | sink        ] kCustomCall"
_THUNK = re.compile(r"^(?P<indent> *)(?P<id>\d+): (?P<kind>k\w+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Thunk:
    """Something that the program launches, or a container of thunks."""

    kind: str  # "kCustomCall", "kCommandBuffer", "kWhile", ...
    instruction: str  # in the compiled text, without its "%"; "" if there is none
    inside: tuple[str, ...]  # kinds of the containers around it, outermost first

    @property
    def is_in_command_buffer(self) -> bool:
        return "kCommandBuffer" in self.inside

    @property
    def is_loop_in_command_buffer(self) -> bool:
        """Whether this is a while loop that is, as a whole, in a command buffer."""
        return self.kind == "kWhile" and self.is_in_command_buffer


def read_thunks(dump_folder: Path) -> list[Thunk]:
    """The thunks of the only program that was dumped into a folder, in the order of launching.

    Raises:
        FileNotFoundError: The folder has no such dump.
    """
    # XLA writes the first of these files only if its last passes changed something. One of these
    # passes makes command buffers, so without this file there are none.
    for suffix in ("thunk_sequence_after_thunk_passes.txt", "thunk_sequence.txt"):
        found = sorted(dump_folder.glob(f"*{suffix}"))
        if found:
            break
    else:
        raise FileNotFoundError(f"XLA dumped no thunks into {dump_folder}")
    metadata = next(dump_folder.glob("*thunk_metadata.txt")).read_text()
    return parse_thunks(found[0].read_text(), parse_instructions(metadata))


def parse_instructions(metadata: str) -> dict[int, str]:
    """Thunk id -> instruction, from XLA's text of its `ThunkMetadataListProto`."""
    pairs = re.findall(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)', metadata)
    return {int(thunk_id): name for name, thunk_id in pairs}


def parse_thunks(sequence: str, instructions: dict[int, str]) -> list[Thunk]:
    """Parses XLA's text. The indentation of a thunk shows the containers around it."""
    thunks: list[Thunk] = []
    around: list[tuple[int, str]] = []  # indentation and kind of the thunks that may be containers
    for line in sequence.splitlines():
        found = _THUNK.match(line)
        if found is None:  # "condition:" and "body:"
            continue
        indent = len(found["indent"])
        while around and around[-1][0] >= indent:
            around.pop()
        thunks.append(
            Thunk(
                kind=found["kind"],
                instruction=instructions.get(int(found["id"]), ""),
                inside=tuple(kind for _, kind in around),
            )
        )
        around.append((indent, found["kind"]))
    return thunks
