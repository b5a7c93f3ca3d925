"""`GrammarBitmask`: which tokens the grammars of a step's requests allow next."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GrammarBitmask:
    """One row for each request of a step that is bound by a grammar and draws a token in it.

    Args:
        req_ids: Each once, in any order.
        bitmask_np: i32[len(req_ids), ceil(vocab_size / 32)], bit `t % 32` of word `t // 32` set
            where token t is allowed: llguidance's layout. Bits past the vocabulary are ignored. A
            request that may draw anything for now has a row of ones (-1 in every word).
    """

    req_ids: list[str]
    bitmask_np: np.ndarray
