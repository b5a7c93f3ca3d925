"""Makes the table of models in docs/guide/models.md, and the number of them in README.md.

`python -m tests.aot.models_table` prints the table, and `--write` puts it into the pages. Names and
what is special come from the first paragraph of each family's module. The columns of bodies need
JAX 0.11.2 or newer (`body_table.py`), the last column needs torch and transformers. A column that
this Python cannot compute keeps its cells, so two Pythons can fill the table one after the other.
"""

import argparse
import ast
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from models.registry import FAMILIES, read_config
from pallas_kernels import dispatch
from tests.aot.body_table import (
    ATTENTION_OPS,
    DEVICES,
    Choice,
    Device,
    PublishedConfig,
    choices_of,
    expert_choices_of,
    experts_of,
    layers_of,
    published_configs,
    state_choices_of,
)

ROOT = Path(__file__).parents[2]
PAGE, README = ROOT / "docs/guide/models.md", ROOT / "README.md"
START = "<!-- Made by `python -m tests.aot.models_table --write`. -->"
END = "<!-- End. -->"
# Architectures that transformers does not have, and what their own tests compare.
_TESTED_ALONE = {"MiMoForCausalLM": "one program"}
# In a cell that no Python has computed yet.
UNKNOWN = "not known yet"
_STEPS = {"decode": "decodes", "mixed": "prompts"}
_TESTED = "tested under"
_COLUMNS = (
    *("family", "architecture", "what is special"),
    *(device.name for device in DEVICES),
    _TESTED,
)
_SENTENCE = (
    "paxkv runs {count} architectures of decoder-only text models, among them Llama,\n"
    "Mistral, Qwen, Gemma, Phi, GLM, OLMo, Granite, Command R and gpt-oss.\n"
    "[Models](docs/guide/models.md) lists all of them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the first paragraph of a family's module says."""

    name: str  # "OLMo 2"
    special: str  # "norms after attention and after the MLP"


def family_of(architecture: str) -> Family:
    """Reads the first paragraph of the module of an architecture.

    Raises:
        ValueError: It has another form than "NAME: what is special."
    """
    path = ROOT / f"{FAMILIES[architecture].partition(':')[0].replace('.', '/')}.py"
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    name, colon, special = paragraph.partition(": ")
    if not colon or not special.endswith(".") or "|" in paragraph:
        raise ValueError(
            f"{path} begins with {paragraph!r}; expected 'NAME OF THE MODELS: what is special.', "
            "without '|'. It becomes a row of docs/guide/models.md."
        )
    return Family(name=name, special=special.removesuffix("."))


def bodies_of(published: PublishedConfig, device: Device) -> str:
    """Which ops of a model have a kernel on a device, in the engine's steps.

    Ops other than attention for which the device has no kernel at all are left out.
    """
    choices: dict[str, list[Choice]] = {}
    for step, step_name in _STEPS.items():
        for layer in layers_of(published, device):
            for op, choice in choices_of(layer, step).items():
                name = f"attention of {step_name}" if op in ATTENTION_OPS else f"`{op}`"
                choices.setdefault(name, []).append(choice)
        shapes = experts_of(published)
        if shapes is not None:
            experts = expert_choices_of(shapes, device, step)
            choices[f"experts of {step_name}"] = [experts.up, experts.down]
    has_kernel = {
        name: all(choice.body != "xla" for choice in of_name)
        for name, of_name in choices.items()
        if name.startswith("attention")
        or not all(choice.reason == "there is no kernel for this op" for choice in of_name)
    }
    if states := state_choices_of(published, device):
        # There are kernels for decode steps alone.
        if all(choice.body != "xla" for choice in states):
            has_kernel |= {"states of decodes": True, "states of prompts": False}
        else:
            has_kernel["states"] = False
    without = [name for name, has in has_kernel.items() if not has]
    if not without:
        return "kernels"
    return f"kernels, except {', '.join(without)}" if any(has_kernel.values()) else "plain XLA"


def tested_settings() -> dict[str, str]:
    """Architecture -> what the normal tests compare with transformers."""
    # Both import torch and transformers, which are optional.
    from tests.end_to_end.test_parity import EVERY_KIND, EVERY_SETTING
    from tests.oracles import families, wholes
    from tests.oracles.test_families import DECODERS, LOADED

    tested = dict(_TESTED_ALONE)
    for name in LOADED:
        config = DECODERS[name]()
        config.architectures = [families.model_class(config).__name__]
        hf_config = json.loads(config.to_json_string(use_diff=False))
        architecture = read_config(hf_config).architecture
        tested.setdefault(architecture, "one program")
        if name in EVERY_SETTING and tested[architecture] != "all programs":
            tested[architecture] = "all settings"
        if name in EVERY_KIND:
            tested[architecture] = "all programs"
    for name in wholes.LOADED:
        config = wholes.CONFIGS[name]()
        hf_config = json.loads(config.to_json_string(use_diff=False))
        hf_config["architectures"] = [wholes.architecture_of(config)]
        tested.setdefault(read_config(hf_config).architecture, "one program")
    return tested


def make_table(page: str) -> str:
    """The table in Markdown, sorted by family.

    Args:
        page: The text of the page, whose cells stay where this Python cannot compute them.
    """
    kept = _rows_of(page)
    columns: dict[str, Callable[[str], str]] = {}
    if can_choose_bodies():
        published = published_configs()
        for device in DEVICES:
            columns[device.name] = lambda name, on=device: bodies_of(published[name], on)
    if can_load_oracles():
        tested = tested_settings()
        columns[_TESTED] = lambda name: tested.get(name, UNKNOWN)
    rows = []
    for architecture in FAMILIES:
        family = family_of(architecture)
        cells = [family.name, f"`{architecture}`", family.special]
        for column in _COLUMNS[len(cells) :]:
            of_page = kept.get(architecture, {}).get(column, UNKNOWN)
            compute = columns.get(column)
            cells.append(of_page if compute is None else compute(architecture))
        rows.append(cells)
    rows.sort(key=lambda cells: [cells[0].casefold(), cells[1]])
    lines = [_COLUMNS, ["---"] * len(_COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def can_choose_bodies() -> bool:
    """Whether this JAX has the GPU kernels."""
    return jax.__version_info__ >= dispatch.MIN_JAX_FOR_MOSAIC_GPU


def can_load_oracles() -> bool:
    """Whether torch and transformers are installed."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def _rows_of(page: str) -> dict[str, dict[str, str]]:
    """Architecture -> column -> cell, of the table in the page."""
    lines = [line for line in _parts_of(page)[1].splitlines() if line.startswith("| ")]
    cells = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    if not cells:
        return {}
    columns, _, *rows = cells
    found = [dict(zip(columns, row, strict=True)) for row in rows]
    return {row["architecture"].strip("`"): row for row in found if "architecture" in row}


def _parts_of(page: str) -> tuple[str, str, str]:
    """The text up to the first mark, between the marks, and from the second mark on."""
    before, start, rest = page.partition(START)
    inside, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"a page has no place for the table: wanted the lines {START} and {END}.")
    return f"{before}{start}", inside, f"{end}{after}"


def with_table(page: str) -> str:
    """The text of docs/guide/models.md with the current table between its two marks.

    Raises:
        ValueError: The page lacks one of the marks, or a family's module has no first paragraph for
            the table.
    """
    return _with_inside(page, make_table(page))


def with_count(readme: str) -> str:
    """The text of README.md with the current sentence between its two marks. Raises as above."""
    return _with_inside(readme, _SENTENCE.format(count=len(FAMILIES)))


def _with_inside(page: str, text: str) -> str:
    before, _, after = _parts_of(page)
    return f"{before}\n\n{text}\n\n{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into the pages")
    arguments = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    table = make_table(page)
    if arguments.write:
        PAGE.write_text(_with_inside(page, table), encoding="utf-8")
        README.write_text(with_count(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table)
    if not can_choose_bodies():
        wanted = ".".join(map(str, dispatch.MIN_JAX_FOR_MOSAIC_GPU))
        names = ", ".join(device.name for device in DEVICES)
        print(f"kept the columns {names}: they need JAX {wanted} or newer.", file=sys.stderr)
    if not can_load_oracles():
        print(f"kept the column {_TESTED!r}: it needs torch and transformers.", file=sys.stderr)


if __name__ == "__main__":
    main()
