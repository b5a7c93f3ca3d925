"""Draws a list of mutants from a tree, and finds the mutants of a list in another tree."""

import ast
import bisect
import dataclasses
import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.mutants.sites import (
    KIND_GROUPS,
    Site,
    SiteName,
    find_sites,
    functions_of,
    is_worth_mutating,
)

_SAMPLING_FILES = {
    "sampler.py",
    "sampler_program.py",
    "step_sampler.py",
    "logits_processors.py",
    "row_state.py",
    "sampling_columns.py",
    "sampled_tokens.py",
    "wide_logprobs.py",
}
MUTANTS_PER_AREA = 20
# Folders of each area; those of the old and of the new layout. A list names functions, so these
# count only when one is drawn.
AREAS: dict[str, tuple[str, ...]] = {
    "pool and managers": ("paxkv/kv_cache",),
    "scheduler": ("paxkv/scheduler",),
    "runner": ("paxkv/runner",),
    "sampler": ("paxkv/runner",),
    "client": ("paxkv/client", "paxkv/fleet"),
    "server": ("paxkv/server",),
}
TARGET_PACKAGES = tuple(sorted({folder for folders in AREAS.values() for folder in folders}))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One line of a list."""

    id: str
    area: str
    file: str  # where it was drawn; it may have moved since
    name: SiteName

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Mutant":
        fields = json.loads(line)
        return cls(**fields | {"name": SiteName(**fields["name"])})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a mutant of a list is in a tree."""

    path: str
    source: str
    site: Site


def files_of_area(root: Path, area: str) -> list[str]:
    paths = (
        path.relative_to(root).as_posix()
        for folder in AREAS[area]
        for path in (root / folder).rglob("*.py")
    )
    return sorted(path for path in paths if _is_in_area(path, area))


def _is_in_area(path: str, area: str) -> bool:
    if "/trace/" in path or not is_worth_mutating(path):
        return False
    is_sampling = path.rpartition("/")[2] in _SAMPLING_FILES
    return is_sampling == (area == "sampler") if area in ("runner", "sampler") else True


def draw(
    root: Path,
    executed_lines: Mapping[str, set[int]],
    seed: int,
    num_per_area: int = MUTANTS_PER_AREA,
) -> list[Mutant]:
    """Draws mutants of every area; equal arguments give an equal list.

    Args:
        executed_lines: Of each file, the lines that a passing test executes. Other lines are not
            drawn: no test could kill a mutant there.
    """
    mutants = []
    for area in AREAS:
        rng = random.Random(f"{seed} {area}")
        sites = {}
        for path in files_of_area(root, area):
            executed = executed_lines.get(path, set())
            found = find_sites((root / path).read_text()) if executed else []
            sites[path] = [site for site in found if executed.intersection(site.lines)]
        chosen = _draw_area(rng, sites, executed_lines, num_per_area)
        mutants += [
            Mutant(id=f"{area.replace(' ', '-')}-{number:02}", area=area, file=path, name=site.name)
            for number, (path, site) in enumerate(chosen, start=1)
        ]
    return mutants


def _draw_area(
    rng: random.Random,
    sites: Mapping[str, Sequence[Site]],
    executed_lines: Mapping[str, set[int]],
    num_wanted: int,
) -> list[tuple[str, Site]]:
    """Files in proportion to their executed lines; within a file every group of kinds alike."""
    left = {path: list(found) for path, found in sites.items() if found}
    if not left:
        return []
    paths = rng.sample(sorted(left), len(left))
    ends = list(itertools.accumulate(len(executed_lines[path]) for path in paths))
    # Evenly spaced points on the lines of all files put one after the other.
    spacing = ends[-1] / num_wanted
    first = rng.uniform(0, spacing)
    chosen = []
    for number in range(num_wanted):
        path = paths[bisect.bisect_right(ends, first + number * spacing)]
        if not left[path]:
            others = [other for other in paths if left[other]]
            if not others:
                break
            path = rng.choice(others)
        groups = [
            group
            for kinds in KIND_GROUPS
            if (group := [site for site in left[path] if site.name.kind in kinds])
        ]
        site = rng.choice(rng.choice(groups))
        chosen.append((path, site))
        left[path] = [other for other in left[path] if other.lines != site.lines]
    return chosen


def find_mutants(
    root: Path, mutants: Iterable[Mutant], package: str = "paxkv"
) -> dict[str, Place | None]:
    """Where each mutant is now, by its id; None if its function or line is gone.

    If several files have a function of that name, a file with the base name of the drawn one is
    taken, or else the first that has the line.
    """
    mutants = list(mutants)
    wanted = {mutant.name.function for mutant in mutants}
    sources: dict[str, str] = {}
    files_with: dict[str, list[str]] = {}
    sites: dict[tuple[str, SiteName], Site] = {}
    for file in sorted((root / package).rglob("*.py")):
        source, path = file.read_text(), file.relative_to(root).as_posix()
        functions = wanted.intersection(functions_of(ast.parse(source)))
        for function in functions:
            files_with.setdefault(function, []).append(path)
        if functions:
            sources[path] = source
            sites |= {(path, site.name): site for site in find_sites(source, functions)}
    places: dict[str, Place | None] = {}
    for mutant in mutants:
        paths = files_with.get(mutant.name.function, [])
        same_base = [path for path in paths if Path(path).name == Path(mutant.file).name]
        places[mutant.id] = next(
            (
                Place(path=path, source=sources[path], site=sites[path, mutant.name])
                for path in same_base or paths
                if (path, mutant.name) in sites
            ),
            None,
        )
    return places
