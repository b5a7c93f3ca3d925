"""Relative links of README.md, docs/ and paxkv/*.md point to files and headings that exist."""

import re
from pathlib import Path

import pytest

from tests.end_to_end.doc_examples import PAGES
from tests.end_to_end.real_server import ROOT

LINKED_FROM = [*PAGES, *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "paxkv").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
OTHER_SITE = re.compile(r"[a-z]+:")


def without_code(text: str) -> str:
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(text: str) -> set[str]:
    """As GitHub makes them: "## The model's defaults" -> "the-models-defaults"."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for link in LINK.findall(without_code(text)):
        if OTHER_SITE.match(link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            broken.append(link)
        elif anchor and anchor not in anchors(target.read_text()):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", LINKED_FROM)
def test_links_point_to_files_and_headings_that_exist(page) -> None:
    assert broken_links(ROOT / page, (ROOT / page).read_text()) == []


def test_checker_finds_planted_links(tmp_path) -> None:
    (tmp_path / "other.md").write_text("# One heading\n")
    text = (
        "[a](other.md) [b](other.md#one-heading) [c](#here) [d](https://x.org/none) `[e](none)`\n\n"
        "# Here\n\n[f](none.md) [g](other.md#two) ![h](none.png) [i](#there)\n"
    )
    page = tmp_path / "page.md"
    page.write_text(text)
    found = broken_links(page, text)
    assert found == ["none.md", "other.md#two", "none.png", "#there"]
