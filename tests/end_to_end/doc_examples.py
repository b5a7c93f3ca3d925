"""Reads the fenced blocks of README.md and docs/**/*.md, and decides how a test runs each.

A block runs as it stands, in the order of its page, with the files that the page names before it.
`<!-- file: NAME -->` above a block makes it a file, `<!-- not run: REASON -->` leaves it out. A
```text block directly after another block is what that block prints; elsewhere it is an
illustration, and so is a block without a language.
"""

import dataclasses
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Literal

from tests.end_to_end.real_server import ROOT

# Paths below the root, as in "docs/guide/serving.md".
PAGES = [
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
# Where the pages' server is; tests put the address of theirs in its place.
DOCUMENTED_URL = "http://127.0.0.1:8000"

_FENCE = re.compile(r"```(\w*)$")
_REMARK = re.compile(r"<!-- (file|not run): (.+?) -->$")
_SERVE = re.compile(r"(?:paxkv serve|python -m paxkv\.serve)\b")
# They load a model of their own, or need what only such a command writes.
_HEAVY = re.compile(
    r"LLM\(|CompiledGenerator\(|paxkv (?:generate|run-batch|compile|replay|bench)\b"
)
# They install, download, or take minutes to hours, so a page has to say that they are not run.
_NEVER_RUN = re.compile(
    r"\b(?:pip install|python3? -m (?:venv|pytest|benchmarks|models)\b|pytest|git clone)"
)
_ILLUSTRATIONS = ("", "text")
_RUN = ("python", "bash")

Kind = Literal["client", "heavy", "serve", "file", "left out", "illustration", "unmarked"]


@dataclasses.dataclass(slots=True, kw_only=True)
class DocExample:
    """One block.

    Args:
        file_name: Of a block that is a file.
        reason: Why a block that is left out is, or what an unmarked one lacks.
        output: What it prints, where the page shows that.
    """

    page: str
    line: int
    language: str
    text: str
    kind: Kind
    file_name: str | None = None
    reason: str | None = None
    output: str | None = None

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def serve_arguments(self) -> tuple[dict[str, str], list[str]]:
        """Variables and flags of the command that starts a server."""
        for command in self.text.replace("\\\n", " ").splitlines():
            found = _SERVE.search(command)
            if found is not None:
                variables = dict(w.split("=", 1) for w in shlex.split(command[: found.start()]))
                return variables, shlex.split(command[found.end() :], comments=True)
        raise ValueError(f"{self.name} starts no server")

    @property
    def serve_script(self) -> str:
        """The block with its last command in the shell's place, on any free port."""
        return _SERVE.sub(lambda m: f"exec {m[0]} --port 0", self.text)


def page_examples(page: str) -> list[DocExample]:
    """All blocks of a page, with the output blocks already at what prints them."""
    return text_examples(page, (ROOT / page).read_text())


def text_examples(page: str, text: str) -> list[DocExample]:
    """As `page_examples`, of a text that may be no file."""
    examples: list[DocExample] = []
    remark: tuple[str, str] | None = None
    # Whether nothing but empty lines came since the last block.
    is_after_block = False
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        fence = _FENCE.match(line)
        if fence is None:
            found = _REMARK.match(line)
            if found is not None or line:
                remark = None if found is None else (found[1], found[2])
                is_after_block = False
            continue
        body = []
        for _, inner in lines:
            if inner == "```":
                break
            body.append(inner)
        example = _example(page, number, fence[1], "\n".join(body) + "\n", remark)
        if example.kind == "illustration" and is_after_block and examples[-1].language in _RUN:
            examples[-1].output = example.text
        else:
            examples.append(example)
        remark, is_after_block = None, True
    return examples


def _example(
    page: str, line: int, language: str, text: str, remark: tuple[str, str] | None
) -> DocExample:
    example = DocExample(page=page, line=line, language=language, text=text, kind="client")
    if remark is not None and remark[0] == "not run":
        example.kind, example.reason = "left out", remark[1]
    elif remark is not None:
        example.kind, example.file_name = "file", remark[1]
    elif language in _ILLUSTRATIONS:
        example.kind = "illustration"
    elif language not in _RUN or (language == "bash" and _NEVER_RUN.search(text)):
        example.kind = "unmarked"
        example.reason = "say above the block which file it is, or why it is not run"
    elif language == "bash" and _SERVE.search(text):
        example.kind = "serve"
    elif _HEAVY.search(text):
        example.kind = "heavy"
    return example


def command_environment(folder: Path) -> dict[str, str]:
    """An environment in which `paxkv` and `python` are the ones under test."""
    programs = folder / "programs-under-test"
    programs.mkdir(exist_ok=True)
    for name, words in (("paxkv", "-m paxkv.entrypoints.cli.main"), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        program.chmod(0o755)
    return os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "",
    }
