"""Checks the table of models in docs/guide/models.md, and the number of them in README.md."""

import ast

import pytest

from models.registry import FAMILIES
from tests.aot import models_table
from tests.aot.models_table import (
    END,
    PAGE,
    README,
    START,
    UNKNOWN,
    Family,
    family_of,
    with_count,
    with_table,
)

COMMAND = "run `python -m tests.aot.models_table --write`"
# Columns that this Python cannot compute keep their cells, so each Python checks its part.
TABLE = PAGE.read_text(encoding="utf-8")


def test_the_documented_table_is_that_of_the_code():
    assert with_table(TABLE) == TABLE, COMMAND


def test_the_documented_number_of_architectures_is_that_of_the_code():
    readme = README.read_text(encoding="utf-8")
    assert with_count(readme) == readme, COMMAND


def test_every_cell_is_known():
    assert UNKNOWN not in TABLE, (
        f"{COMMAND} with another Python, as docs/guide/adding-a-model.md says"
    )


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_first_paragraph_of_a_family_says_what_is_special(architecture):
    family = family_of(architecture)
    assert f"| {family.name} | `{architecture}` | {family.special} |" in TABLE, COMMAND


@pytest.fixture
def one_family(monkeypatch):
    """A registry of one family, and a Python that can compute no further column."""
    monkeypatch.setattr(models_table, "FAMILIES", {"OlmoForCausalLM": "models.families.olmo:O"})
    monkeypatch.setattr(models_table, "can_choose_bodies", lambda: False)
    monkeypatch.setattr(models_table, "can_load_oracles", lambda: False)
    monkeypatch.setattr(models_table, "family_of", lambda _: Family(name="New", special="is new"))


def test_columns_that_cannot_be_computed_keep_their_cells(one_family):
    head = "| family | architecture | what is special | H200 | TPU v6e | tested under |"
    row = "| Old | `OlmoForCausalLM` | was old | kernels | plain XLA | all settings |"
    page = f"a\n\n{START}\n\n{head}\n| --- |\n{row}\n\n{END}\n\nb"
    assert with_table(page) == page.replace("Old", "New").replace("was old", "is new").replace(
        "| --- |", "| --- | --- | --- | --- | --- | --- |"
    )
    # A family without a row.
    page = f"a\n\n{START}\n\n{END}\n\nb"
    cells = " | ".join([UNKNOWN] * 3)
    assert f"| New | `OlmoForCausalLM` | is new | {cells} |\n\n{END}\n\nb" in with_table(page)


def test_a_page_without_a_place_for_the_table_is_an_error():
    with pytest.raises(ValueError, match="no place for the table"):
        with_count("# Models\n")


@pytest.mark.parametrize("text", ["Llama's layers.", "OLMo: norms", "A | B: norms.", ""])
def test_a_first_paragraph_of_another_form_is_an_error(monkeypatch, text):
    monkeypatch.setattr(ast, "get_docstring", lambda _: f"{text}\n\nMore.")
    with pytest.raises(ValueError, match="expected 'NAME OF THE MODELS: what is special.'"):
        family_of("OlmoForCausalLM")
