"""Products of few rows on one core, as loops over inputs that XLA:CPU compiles well."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

# Inputs that one turn of a loop goes through. What it needs of x then fits into the 32 vector
# registers of AVX-512, with up to 48 tokens.
_INPUTS_A_TURN = 8
# Kernels share a loop up to so many columns; with 32 tokens the sums of these are 256 KiB.
_COLUMNS_A_LOOP = 2_048
# With other numbers of tokens the machine code goes through some of them one by one.
_TOKEN_MULTIPLE = 8


def is_worth_a_loop(num_tokens: int, in_features: int) -> bool:
    """Whether `multiply_few_rows` should multiply so many tokens by kernels of so many inputs.

    24 tokens gain a tenth, which is not worth another loop to compile for every kernel.
    """
    num_rows = num_tokens + -num_tokens % _TOKEN_MULTIPLE
    return num_rows.bit_count() == 1 and in_features % _INPUTS_A_TURN == 0


def multiply_few_rows(
    x: jax.Array,  # f32[num_tokens, in_features]
    kernels: Sequence[jax.Array],  # f32[in_features, columns], each with columns of its own
) -> list[jax.Array]:  # f32[num_tokens, columns], one for each kernel
    """`x @ kernel` for each, as sums of outer products of x's columns and the kernel's rows.

    A turn of the loop adds eight of them, as one fused expression. LLVM keeps that part of x in
    vector registers and goes through the kernel's rows once, number by number: they need not be
    packed first, which is most of what XLA's own products do with few tokens. The eight rows are
    an eighth of the kernel apart, so that memory is read in eight long runs, turn after turn.

    Time over that of XLA's own products, one product of 512, 1,024 or 3,072 inputs and 512 columns,
    with weights of 100 MB in turn, JAX 0.10.2, one core with AVX-512 in registers of 512 bits: 0.52
    with 8 tokens, 0.57 with 16, 0.8 with 32, 1 with 48, 1.2 with 64. Weights that stay in caches
    gain nothing (`MIN_LOOPED_BYTES` in `models/loading/load_model.py`). On several cores each turn
    is divided among them, which takes longer than the turn.
    """
    num_tokens = x.shape[0]
    x = jnp.pad(x, ((0, -num_tokens % _TOKEN_MULTIPLE), (0, 0)))
    x_runs = _runs(x.T)
    return [
        sums.T[:num_tokens] for group in _groups(kernels) for sums in _sum_in_loop(x_runs, group)
    ]


def _groups(kernels: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Neighbours that one loop multiplies by: they share its turns."""
    groups: list[list[jax.Array]] = []
    room = 0
    for kernel in kernels:
        if kernel.shape[1] > room:
            groups.append([])
            room = _COLUMNS_A_LOOP
        groups[-1].append(kernel)
        room -= kernel.shape[1]
    return groups


# Traced once for all layers.
@jax.jit
def _sum_in_loop(
    x_runs: jax.Array,  # f32[runs, turns, num_tokens]
    kernels: Sequence[jax.Array],  # f32[in_features, columns]
) -> list[jax.Array]:  # f32[columns, num_tokens]
    kernels_runs = [_runs(kernel) for kernel in kernels]

    def add_turn(turn: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        return [
            _add_outer_products(turn, of_kernel, x_runs, kernel_runs)
            for of_kernel, kernel_runs in zip(sums, kernels_runs, strict=True)
        ]

    # Made of x, or XLA would make the zeros of all loops of a program at its start.
    zero = jnp.minimum(jnp.abs(x_runs[0, 0]), 0)
    zeros = [jnp.broadcast_to(zero, (kernel.shape[1], zero.size)) for kernel in kernels]
    return lax.fori_loop(0, x_runs.shape[1], add_turn, zeros)


def _add_outer_products(
    turn: jax.Array,  # i32[]
    sums: jax.Array,  # f32[columns, num_tokens]
    x_runs: jax.Array,  # f32[runs, turns, num_tokens]
    kernel_runs: jax.Array,  # f32[runs, turns, columns]
) -> jax.Array:  # f32[columns, num_tokens]
    for run in range(_INPUTS_A_TURN):
        kernel_row = _row(kernel_runs, run, turn)
        sums = sums + kernel_row[:, None] * _row(x_runs, run, turn)[None, :]
    return sums


def _runs(
    rows: jax.Array,  # f[in_features, width]
) -> jax.Array:  # f[runs, turns, width]
    return rows.reshape(_INPUTS_A_TURN, rows.shape[0] // _INPUTS_A_TURN, rows.shape[1])


def _row(
    runs: jax.Array,  # f[runs, turns, width]
    run: int,
    turn: jax.Array,  # i32[]
) -> jax.Array:  # f[width]
    # A slice of its own for each: XLA would copy one that several expressions read.
    row = lax.dynamic_slice(
        runs, (run, turn, 0), (1, 1, runs.shape[2]), allow_negative_indices=False
    )
    return row.reshape(-1)
