"""Steps of deep models, compiled for an H200: more layers add calls of kernels, but no kernels."""

import functools
import itertools

import pytest

from models.platforms import GPU
from tests.aot.step_programs import build_model, burst, mixed_step
from tests.quick_compile import marked_sizes

COMPILES_SAMPLER = True
SHALLOW, DEEP = 2, 28
KINDS = {"mixed": functools.partial(mixed_step, num_tokens=512), "burst": burst}
each_kind = pytest.mark.parametrize("kind", marked_sizes(["mixed"], slow=["burst"]))


@pytest.fixture(scope="module")
def compiled(h200, compile_for_h200, tmp_path_factory):
    """Returns a function of a kind of step and a number of layers. Compiles each once."""
    folder = tmp_path_factory.mktemp("models")
    model = functools.cache(lambda num_layers: build_model(folder, "llama", num_layers=num_layers))
    # The size of the cache is compiled into kernels. Each program gets a size that no other program
    # of this process has. So it compiles all its kernels itself, and their time is measured.
    sizes = itertools.count(1_001)

    @functools.cache
    def compile_step(kind, num_layers):
        program = KINDS[kind](model(num_layers), h200.mesh, num_blocks=next(sizes))
        return compile_for_h200(
            program.function,
            *program.args,
            donate_argnums=program.donate_argnums,
            compiler_options=GPU().compiler_options(["bfloat16"]),
        )

    return compile_step


@each_kind
def test_a_kernel_is_lowered_and_compiled_once_for_all_layers(compiled, kind):
    shallow, deep = compiled(kind, SHALLOW), compiled(kind, DEEP)
    assert deep.num_lowered_kernels == shallow.num_lowered_kernels
    assert deep.num_kernels == shallow.num_kernels
    # Each further layer still calls at least two kernels.
    more_layers = DEEP - SHALLOW
    assert len(deep.kernel_names) - len(shallow.kernel_names) >= 2 * more_layers


@each_kind
def test_28_layers_take_at_most_twice_the_compile_time_of_2(compiled, kind, record_property):
    times = {num_layers: compiled(kind, num_layers).cpu_s for num_layers in (SHALLOW, DEEP)}
    for num_layers, cpu_s in times.items():
        record_property("compile_time", f"{kind}, {num_layers} layers: {cpu_s:.1f} CPU seconds")
    assert times[DEEP] <= 2 * times[SHALLOW]


@each_kind
def test_no_layer_is_chosen_by_a_conditional(compiled, kind):
    """On a GPU the host would wait for the index, or each branch would be a node of the graph."""
    shallow, deep = compiled(kind, SHALLOW), compiled(kind, DEEP)
    # The sampler has conditionals with two branches: does any request sample at random?
    assert deep.num_branches == shallow.num_branches == [2] * len(deep.num_branches)
