"""The settings that must not change an answer: the full product and a pairwise selection."""

import itertools
from collections.abc import Callable, Sequence
from random import Random

from paxkv.contracts.kv_cache_spec import KVCacheSpec
from tests.end_to_end.engine_harness import MAX_DECODE_BURST, EngineSettings

# Longest request: 101 prompt tokens and 12 new ones, the last of which is never cached.
LONGEST_REQUEST = 112

FACTORS: dict[str, tuple[object, ...]] = {
    "recipe": ("llama", "qwen3"),
    "enable_prefix_caching": (True, False),
    "max_num_batched_tokens": (16, 64, 2048),
    "block_size": (8, 16, 32, 64),
    "has_tiny_pool": (False, True),
    "arrival_gap": (0, 3),
    # One step after the other; or the next is decided while one runs, and decodes come in bursts.
    "is_ahead": (False, True),
}
# Among equally good candidates the first is taken; this order gives a short selection.
SHUFFLE_SEED = 3
Combination = tuple[object, ...]


def full_product(**levels: tuple[object, ...]) -> list[Combination]:
    """Every combination of `FACTORS`, some of which may be given other levels."""
    return list(itertools.product(*(FACTORS | levels).values()))


def pairs_of(combination: Combination) -> set[tuple[int, object, int, object]]:
    """Every pair of settings that a combination holds."""
    return {
        (i, combination[i], j, combination[j])
        for i, j in itertools.combinations(range(len(combination)), 2)
    }


def pairwise_selection(**levels: tuple[object, ...]) -> list[Combination]:
    """A small part of the product in which every two settings meet, chosen greedily."""
    candidates = full_product(**levels)
    Random(SHUFFLE_SEED).shuffle(candidates)
    missing = set().union(*(pairs_of(c) for c in candidates))
    chosen: list[Combination] = []
    while missing:
        best = max(candidates, key=lambda c: len(pairs_of(c) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def settings_of(
    combination: Combination, specs_of: Callable[[str, int], Sequence[KVCacheSpec]]
) -> tuple[str, EngineSettings]:
    """The recipe's name and the engine settings of a combination.

    Args:
        specs_of: Recipe and block size -> the formats of the KV cache groups.
    """
    values = dict(zip(FACTORS, combination, strict=True))
    block_size, budget = values["block_size"], values["max_num_batched_tokens"]
    specs = specs_of(values["recipe"], block_size)
    longest = sum(
        spec.max_held_blocks(max_model_len=LONGEST_REQUEST, max_num_batched_tokens=budget)
        for spec in specs
    )
    # Room for the longest request and little more: everything else has to wait or be preempted.
    tiny = 1 + longest + len(specs) * max(1, 24 // block_size)
    settings = EngineSettings(
        enable_prefix_caching=values["enable_prefix_caching"],
        max_num_batched_tokens=budget,
        block_size=block_size,
        num_blocks=tiny if values["has_tiny_pool"] else 8 * tiny,
        arrival_gap=values["arrival_gap"],
        max_steps_in_flight=2 if values["is_ahead"] else 1,
        max_decode_burst=MAX_DECODE_BURST if values["is_ahead"] else 1,
    )
    return values["recipe"], settings
