"""Models of the recipes and their compiled steps, made once per process for all tests."""

import dataclasses
import functools
import tempfile
from pathlib import Path

from models import LoadedModel, Platform, load_model
from models.platforms import CPU
from tests.oracles.paged_stepper import PagedStepper
from tests.oracles.recipes import write_recipe

IN_TURN = Platform()


@functools.cache
def checkpoint_folder(recipe: str) -> Path:
    """The recipe's checkpoint, written once."""
    return write_recipe(Path(tempfile.mkdtemp()) / recipe, recipe)


@functools.cache
def model_of(recipe: str, loops_over_layers: bool = False) -> LoadedModel:
    """The recipe's model in float32, its layers in turn or in a loop.

    Ops run as their reference bodies, which compile in less time. Tests of each op compare its XLA
    body with the reference, and tests of engines run the XLA bodies.
    """
    if not loops_over_layers:
        model = load_model(checkpoint_folder(recipe), dtype="float32")
        kernels = dataclasses.replace(model.kernels, implementation="reference")
        return dataclasses.replace(model.with_kernels(kernels), platform=IN_TURN)
    return in_loop(model_of(recipe))


def in_loop(model: LoadedModel) -> LoadedModel:
    """The model with its layers in a loop."""
    return dataclasses.replace(model, platform=CPU(num_threads=1, instruction_sets=frozenset()))


@functools.cache
def _compiled_stepper(
    recipe: str, loops_over_layers: bool, only_last_tokens: bool, widths: tuple[int, ...]
) -> PagedStepper:
    model = model_of(recipe, loops_over_layers)
    return PagedStepper(model, only_last_tokens=only_last_tokens, widths=widths)


def fresh_stepper(
    recipe: str,
    *,
    loops_over_layers: bool = False,
    only_last_tokens: bool = False,
    widths: tuple[int, ...] = (),
) -> PagedStepper:
    """The recipe's stepper, compiled once for all tests, without the requests of earlier ones."""
    stepper = _compiled_stepper(recipe, loops_over_layers, only_last_tokens, widths)
    stepper.reset()
    return stepper
