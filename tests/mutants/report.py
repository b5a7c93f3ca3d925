"""Results as Markdown: counts per area, the survivors, the mutants that are gone."""

import collections
import difflib
from collections.abc import Sequence

from tests.mutants.draw import Mutant
from tests.mutants.runs import Result

_STATES = ("killed", "survived", "gone", "error")
_CONTEXT_CHARS = 40
_TITLES = {
    "survived": "Survivors",
    "gone": "Gone (function or line)",
    "error": "Errors (run again)",
}


def write_report(mutants: Sequence[Mutant], results: Sequence[Result]) -> str:
    found = {result.id: result for result in results}
    counts: dict[str, collections.Counter[str]] = {}
    for mutant in mutants:
        state = found[mutant.id].state if mutant.id in found else "not run"
        counts.setdefault(mutant.area, collections.Counter())[state] += 1
    columns = [*_STATES, "not run"]
    lines = ["| area | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    rows = counts | {"all": sum(counts.values(), collections.Counter())}
    lines += [
        f"| {area} | " + " | ".join(str(count[state]) for state in columns) + " |"
        for area, count in rows.items()
    ]
    for state, title in _TITLES.items():
        listed = [m for m in mutants if m.id in found and found[m.id].state == state]
        if listed:
            lines += ["", f"{title}: {len(listed)}", ""]
            lines += [_item(mutant, found[mutant.id]) for mutant in listed]
    return "\n".join(lines) + "\n"


def _item(mutant: Mutant, result: Result) -> str:
    name = mutant.name
    old, new = changed_part(name.line, name.mutated)
    tests = f"{result.num_run} of {result.num_tests} tests" if result.num_tests else ""
    remarks = "; ".join(filter(None, (tests, result.reason.strip())))
    place = result.path or mutant.file
    text = f"- {mutant.id} `{place}` `{name.function}`, {name.kind}: `{old}` → `{new}`"
    return f"{text} ({remarks})" if remarks else text


def changed_part(line: str, mutated: str) -> tuple[str, str]:
    """The difference of two lines, with a little of what is around it."""
    if mutated == "pass":
        return _shortened(line, 0, len(line)), mutated
    matcher = difflib.SequenceMatcher(None, line, mutated, autojunk=False)
    changes = [block for block in matcher.get_opcodes() if block[0] != "equal"]
    start, end = changes[0][1], changes[-1][2]
    new_start, new_end = changes[0][3], changes[-1][4]
    return _shortened(line, start, end), _shortened(mutated, new_start, new_end)


def _shortened(line: str, start: int, end: int) -> str:
    first, last = max(0, start - _CONTEXT_CHARS), min(len(line), end + _CONTEXT_CHARS)
    return ("…" if first else "") + line[first:last] + ("…" if last < len(line) else "")
