"""Chooses single pass or split-KV, and the number of shares, for the decode kernel.

Single pass: one program for each (request, KV head), which writes the final result. Split-KV: as
many programs as the device runs at once, each with an equal share of all the KV tiles. Then plain
JAX merges the partial results, in a few small kernels.

The rule depends only on shapes, because the choice is compiled into the program:

1. Sequences of at most 8 tiles (512 tokens): single pass. The longest program ends before a merge
   would.
2. At least 4 times as many (request, KV head) pairs as programs that run at once, and sequences of
   at most 64 tiles (4,096 tokens): single pass. The last round of programs leaves less than a
   quarter of the time unused even if it is nearly empty, and no single program lasts long.
3. Otherwise split. Few requests would leave SMs idle. With long block tables, one long sequence
   among short ones would keep one program busy long after all others.

Shares divide the real lengths of sequences. So a block table that is wide enough for 131,072 tokens
costs nothing while sequences are short: no program computes its empty end.

The three numbers are guesses: nothing was measured. On an H200 with two programs per SM (264):

    64 requests x 8,192 tokens, 8 KV heads     512 pairs, 128 tiles    split
    8 x 32,768                                  64 pairs, 512 tiles    split
    256 x 1,024                              2,048 pairs,  16 tiles    single pass
    8 x 512                                     64 pairs,   8 tiles    single pass
"""

SHORT_TILES = 8
ROUNDS = 4
LONG_TILES = 64


def choose_num_shares(
    *, num_reqs: int, num_kv_heads: int, max_tiles: int, num_programs: int
) -> int | None:
    """The number of shares that the work is cut into, or None for a single pass.

    Args:
        max_tiles: KV tiles of the longest sequence that the block table has room for, without tiles
            that lie wholly left of a window or chunk.
        num_programs: Programs that the device runs at once.
    """
    num_pairs = num_reqs * num_kv_heads
    if max_tiles <= SHORT_TILES:
        return None
    if num_pairs >= ROUNDS * num_programs and max_tiles <= LONG_TILES:
        return None
    # There are never more shares than tiles.
    return min(num_programs, num_pairs * max_tiles)
