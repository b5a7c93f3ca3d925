"""Slopes of ALiBi: the factors of the distance that heads add to their logits."""

import math


def make_alibi_slopes(num_heads: int, *, max_bias: float = 8.0) -> tuple[float, ...]:
    """The slopes of a model whose number of heads may not be a power of two.

    With n heads, a power of two, head h has `2 ** (-max_bias * (h + 1) / n)`. Otherwise the first
    heads have the slopes of the next smaller power of two, and the others have every second slope
    of twice as many heads.

    Source: arXiv:2108.12409; the authors' code for other numbers of heads.
    """
    num_first = 2 ** math.floor(math.log2(num_heads))
    first = _slopes_of_power(num_first, max_bias)
    others = _slopes_of_power(2 * num_first, max_bias)[::2]
    return (*first, *others[: num_heads - num_first])


def _slopes_of_power(num_heads: int, max_bias: float) -> list[float]:
    return [2.0 ** (-max_bias * (head + 1) / num_heads) for head in range(num_heads)]
