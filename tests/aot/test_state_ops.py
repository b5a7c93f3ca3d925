"""The ops that advance states in pages, compiled for an H200."""

import dataclasses

import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import PagedStates

NUM_ROWS, NUM_BLOCKS, NUM_REQS = 2, 16_384, 64
SMALLEST_GRAPH = {"xla_gpu_graph_min_graph_size": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """A call for 64 requests. By default a layer of Qwen3-Next-80B, with 16 tokens per block."""

    op: str = "gated_delta_step"

    num_heads: int = 32
    num_lines: int = 128  # of a head's state
    line_size: int = 128
    page_words: int = 2 * 2 * 16 * 256
    pages_dtype: str = "bfloat16"
    state_dtype: str = "float32"
    first_number: int = 0
    has_decay_per_row: bool = False

    @property
    def state_bytes(self):
        itemsize = jnp.dtype(self.state_dtype).itemsize
        return NUM_REQS * self.num_heads * self.num_lines * self.line_size * itemsize

    @property
    def cache_bytes(self):
        itemsize = jnp.dtype(self.pages_dtype).itemsize
        return NUM_ROWS * NUM_BLOCKS * self.page_words * itemsize

    def states(self, gpus):
        page_bytes = self.page_words * jnp.dtype(self.pages_dtype).itemsize
        slots = gpus.array((NUM_REQS, -(-self.state_bytes // NUM_REQS // page_bytes)), jnp.int32)
        return PagedStates(
            pages=gpus.array((NUM_ROWS, NUM_BLOCKS, self.page_words), self.pages_dtype),
            row=gpus.array((), jnp.int32),
            read_blocks=slots,
            write_blocks=slots,
            starts_from_zero=gpus.array((NUM_REQS,), jnp.bool_),
            dtype=self.state_dtype,
            first_number=self.first_number,
        )

    def args(self, gpus):
        """The arguments of the op; `ssd_step` has one group."""
        keys = gpus.array((NUM_REQS, self.num_heads, self.num_lines), jnp.float32)
        values = gpus.array((NUM_REQS, self.num_heads, self.line_size), jnp.float32)
        numbers = gpus.array((NUM_REQS, self.num_heads), jnp.float32)
        if self.op == "selective_step":
            rates = gpus.array((self.num_heads, self.num_lines, self.line_size), jnp.float32)
            return self.states(gpus), values, values, rates, keys, keys
        if self.op == "ssd_step":
            of_group = gpus.array((NUM_REQS, 1, self.line_size), jnp.float32)
            return self.states(gpus), keys, of_group, of_group, numbers
        decays = keys if self.has_decay_per_row else numbers
        return self.states(gpus), keys, keys, values, decays, numbers


def compiled(gpus, compile_for_h200, sizes, donate_argnums=0, **options):
    states, *tokens = sizes.args(gpus)
    op = getattr(pallas_kernels, sizes.op)
    return compile_for_h200(
        lambda states, *tokens: op(states, *tokens, target=gpus.target, **options),
        *(states, *tokens),
        donate_argnums=donate_argnums,
        compiler_options=SMALLEST_GRAPH,
    )


def assert_in_place(program, sizes):
    assert program.aliased_bytes >= sizes.cache_bytes
    assert program.cache_copies(min_bytes=sizes.cache_bytes // NUM_ROWS) == []


# The heads of Bamba-9B.
BAMBA = Sizes(op="ssd_step", num_heads=128, num_lines=64, line_size=128)
JAMBA = Sizes(op="selective_step", num_heads=1, num_lines=16, line_size=8192)
# A slot of Falcon-Mamba is one page, with the window of a convolution before the state.
FALCON_MAMBA = dataclasses.replace(JAMBA, page_words=2 * 19 * 8192, first_number=3 * 8192)
# Two groups of 3,712 channels. This is a multiple of 128, but not of 256.
ZAMBA = dataclasses.replace(JAMBA, num_heads=2, line_size=3712, page_words=2 * 16 * 16 * 232)
# The most registers of a thread with which this many CTAs share an SM.
FIVE_CTAS, FOUR_CTAS, THREE_CTAS, TWO_CTAS = 96, 128, 168, 255


@pytest.mark.parametrize(
    ("sizes", "most_registers"),
    [
        (Sizes(), FIVE_CTAS),
        (Sizes(has_decay_per_row=True), FIVE_CTAS),
        (Sizes(state_dtype="bfloat16"), FIVE_CTAS),
        (Sizes(pages_dtype="float32"), FIVE_CTAS),
        (Sizes(page_words=2 * 4 * 16 * 96), FOUR_CTAS),  # a page has 48 lines of a head's 128
        (Sizes(num_lines=256), THREE_CTAS),
        # Latent attention of Kimi Linear: a page has 36 lines of a head's 128.
        (Sizes(page_words=16 * 576, has_decay_per_row=True), TWO_CTAS),
        (BAMBA, FOUR_CTAS),
        (dataclasses.replace(BAMBA, line_size=256), FOUR_CTAS),
        (dataclasses.replace(BAMBA, state_dtype="bfloat16"), FIVE_CTAS),
        (dataclasses.replace(BAMBA, num_heads=32, num_lines=8, line_size=256), FOUR_CTAS),
        (JAMBA, THREE_CTAS),
        (FALCON_MAMBA, THREE_CTAS),
        (ZAMBA, THREE_CTAS),
        (dataclasses.replace(JAMBA, state_dtype="bfloat16"), FOUR_CTAS),
    ],
    ids=str,
)
def test_the_kernel_is_in_place_and_spills_nothing(h200, compile_for_h200, sizes, most_registers):
    program = compiled(h200, compile_for_h200, sizes)
    assert_in_place(program, sizes)
    # Only factors of decays are stored; states are not.
    assert program.temp_bytes < sizes.state_bytes // 32
    assert program.kernel_names == program.in_command_buffer == [sizes.op]
    (kernel,) = program.ptxas
    assert kernel.spill_bytes == 0 and kernel.registers <= most_registers


@pytest.mark.parametrize("pages_dtype", ["bfloat16", "float32"])
def test_plain_xla_is_in_place(h200, compile_for_h200, pages_dtype):
    """XLA is the body on all other GPUs. It holds the states twice outside of the cache."""
    sizes = Sizes(pages_dtype=pages_dtype)
    program = compiled(h200, compile_for_h200, sizes, implementation="xla")
    assert_in_place(program, sizes)
    assert program.temp_bytes < 2.5 * sizes.state_bytes
    assert program.kernel_names == []


def test_a_cache_that_is_not_donated_is_copied(h200, compile_for_h200):
    """Shows that the tests above can detect a copy."""
    sizes = Sizes()
    program = compiled(h200, compile_for_h200, sizes, donate_argnums=())
    assert len(program.cache_copies(min_bytes=sizes.cache_bytes // NUM_ROWS)) == 1
    assert program.aliased_bytes == 0
