"""Checks the shapes of published models, the documented tables of bodies, and their kernels."""

import jax
import jax.numpy as jnp
import pytest

from models.registry import FAMILIES, read_config
from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU
from pallas_kernels.paged_attention.tuned_blocks import decode_config, max_group_size
from tests.aot.body_table import (
    DEVICES,
    PAGE,
    all_layers,
    choices_of,
    layer_program,
    main,
    published_configs,
    with_tables,
)
from tests.aot.tpu_topology import describe_tpu, missing_for_tpu

H200, TPU_V6E = DEVICES
# No width has a kernel for more query heads per KV head. Wide heads have lower limits, but no
# published model exceeds them.
LARGEST_GROUP = max_group_size(64)
HAS_MOSAIC_GPU = jax.__version_info__ >= MIN_JAX_FOR_MOSAIC_GPU
HAS_LIBTPU = missing_for_tpu() is None
needs_mosaic_gpu = pytest.mark.skipif(not HAS_MOSAIC_GPU, reason="the GPU kernels need a newer JAX")
needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason=str(missing_for_tpu()))


def test_every_family_has_a_published_config():
    assert published_configs().keys() == FAMILIES.keys()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_published_figures_are_the_defaults_of_transformers(architecture):
    transformers = pytest.importorskip("transformers")
    published = published_configs()[architecture]
    defaults = getattr(transformers, published.config_class)().to_dict()
    wanted = {**defaults, "architectures": [architecture], **published.changed}
    assert published.changed.items() <= published.fields.items()
    assert read_config(published.fields) == read_config(wanted)


@needs_mosaic_gpu
def test_the_documented_tables_are_what_dispatch_chooses():
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run `python -m tests.aot.body_table --write`"


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.target.platform)
def test_layers_of_published_configs_can_be_placed(device):
    layers = all_layers(device)
    assert {layer.is_latent for layer in layers} == {False, True}
    assert {layer.is_indexed for layer in layers} == {False, True}


def test_the_command_says_which_jax_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    monkeypatch.setattr("sys.argv", ["body_table"])
    with pytest.raises(SystemExit):
        main()
    assert "need JAX 0.11.2 or newer. Install it, with" in capsys.readouterr().err


def test_a_page_without_a_place_for_the_tables_is_an_error():
    with pytest.raises(ValueError, match="no place for the tables"):
        with_tables("# Kernels\n")


# First two words of the names of attention's kernels -> their op. All other kernels are named as
# their op is.
_OP_OF_KERNEL = {"paged_attention": "paged_attention", "latent_decode": "latent_attention"}


def heads_of(layer):
    """The numbers of heads that change a kernel's code.

    On a GPU, these are the query heads per KV head. For latents and on a TPU, they are the query
    heads and the KV heads.
    """
    num_q_heads, num_kv_heads = layer.attention.num_q_heads, layer.attention.num_kv_heads
    if layer.device.target.platform == "gpu" and not layer.is_latent:
        return (num_q_heads // num_kv_heads,)
    return (num_q_heads, num_kv_heads)


def what_shapes_kernels(layer):
    """Layers with equal values and heads have the same kernel code.

    Only the scale and the numbers of positions and blocks differ. Windows and chunks are left out
    too: tests of single kernels compile them.
    """
    attention = layer.attention
    index = getattr(attention, "index", None)
    return (
        *(stored_shapes(layer), attention.head_dim, attention.value_head_dim),
        index and (index.num_heads, index.head_dim),
    )


def stored_shapes(layer):
    """The layout of the cache, and the rules of attention."""
    attention = layer.attention
    group_size = attention.num_q_heads // attention.num_kv_heads
    is_too_large = layer.device.target.platform == "gpu" and group_size > LARGEST_GROUP
    return (
        is_too_large,
        *(layer.attention_op, type(attention), layer.block_size, layer.stored_width),
        *(attention.has_sinks, attention.soft_cap is None),
    )


def with_most_and_fewest_heads(layers):
    """The names of some of the given layers for each value of `stored_shapes`.

    These have the smallest and the largest groups, the most query heads, and the most KV heads. No
    kernel computes attention with an index, so those with the most heads are enough for each width.
    """

    def q_heads(layer):
        return layer.attention.num_q_heads

    def kv_heads(layer):
        return layer.attention.num_kv_heads

    def group(layer):
        return q_heads(layer) // kv_heads(layer), q_heads(layer)

    kinds = {}
    for layer in layers:
        by_width = (layer.attention_op, layer.stored_width)
        kind = by_width if layer.is_indexed else stored_shapes(layer)
        kinds.setdefault(kind, []).append(layer)
    return {
        str(layer)
        for kind in kinds.values()
        for layer in (
            *(max(kind, key=q_heads), max(kind, key=kv_heads)),
            *(() if kind[0].is_indexed else (min(kind, key=group), max(kind, key=group))),
        )
    }


def released_layers(device, *, compiles):
    """A layer in bfloat16 for each shape of kernels. The table also has float32 and float16.

    A layer is slow if others have its stored width and rules, and fewer and more heads (see
    `with_most_and_fewest_heads`).

    Args:
        compiles: Whether the kernels can be compiled here. If not, the tests are skipped and the
            list is empty: finding the layers takes a second in each process that collects tests.
    """
    if not compiles:
        return []
    layers = [layer for layer in all_layers(device) if layer.dtype == "bfloat16"]
    # The first layer of each shape is kept.
    kept = {(what_shapes_kernels(layer), heads_of(layer)): layer for layer in reversed(layers)}
    quick = with_most_and_fewest_heads(kept.values())
    return [
        pytest.param(layer, marks=() if str(layer) in quick else pytest.mark.slow)
        for layer in kept.values()
    ]


def chosen_kernels(layer):
    """Ops of a step with prompts for which the tables promise a kernel."""
    choices = choices_of(layer, "mixed")
    if layer.is_latent:
        # Plain XLA computes prompts, and kernels the decodes of the same step.
        choices[layer.attention_op] = choices_of(layer, "decode")[layer.attention_op]
    return {op for op, choice in choices.items() if choice.body != "xla"}


@needs_mosaic_gpu
@pytest.mark.parametrize("layer", released_layers(H200, compiles=HAS_MOSAIC_GPU), ids=str)
def test_gpu_kernels_of_published_shapes_do_not_spill(layer, h200, compile_for_h200):
    assert h200.target == H200.target
    # A step with prompts also contains the kernel for decodes, if a kernel computes its prompts.
    function, args = layer_program(layer, "mixed")
    program = compile_for_h200(function, *args, donate_argnums=0)
    names = set(program.kernel_names)
    ops = {_OP_OF_KERNEL.get("_".join(name.split("_")[:2]), name) for name in names}
    assert ops == chosen_kernels(layer)
    group_size = layer.attention.num_q_heads // layer.attention.num_kv_heads
    for kernel in program.ptxas:
        assert (kernel.spill_bytes, kernel.stack_bytes, kernel.remarks) == (0, 0, ())
        if kernel.name == "paged_attention_decode":
            planned = decode_config(jnp.bfloat16, layer.stored_width, group_size)
            assert kernel.ctas_per_sm >= planned.ctas_per_sm
    assert program.aliased_bytes >= args[0].size * args[0].dtype.itemsize


@needs_libtpu
@pytest.mark.parametrize("layer", released_layers(TPU_V6E, compiles=HAS_LIBTPU), ids=str)
def test_tpu_kernels_of_published_shapes_compile(layer):
    tpu = describe_tpu("v6e:2x2")
    assert tpu.target == TPU_V6E.target
    function, args = layer_program(layer, "mixed")
    args = jax.tree.map(lambda array: tpu.array(array.shape, array.dtype), args)
    program = tpu.compile(function, *args, donate_argnums=(0,))
    names = {name.removesuffix("_ragged") for name in program.mosaic_kernels}
    assert names == chosen_kernels(layer)
    assert program.memory.alias_size_in_bytes >= args[0].size * args[0].dtype.itemsize
