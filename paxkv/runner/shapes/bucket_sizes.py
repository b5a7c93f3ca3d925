"""The sizes of programs. A batch is padded to the next larger size."""

import bisect

# Rows that are drawn at a time. A row of a large vocabulary is long, and most steps that compute a
# prompt draw tokens for few rows. Measured in docs/design/cpu.md.
SAMPLED_CHUNK_ROWS = 8

# Most tokens that batch-invariant steps compute at a time. With fewer, a single request is faster;
# with more, prompts and large batches are.
INVARIANT_TILE_TOKENS = 32

# Every bucket is a program that is compiled before the first request, or a part of one
# (`share_programs`). Fewer buckets would mean more padding. If each were four times the one before,
# half of the tokens that short prompts compute would be padding. Every step that is not a burst has
# a prompt. On a CPU, a few tokens take as long as 16: the time to read the weights.
MIN_BATCHED_TOKENS = 16
# With four drafts for one request, 16 tokens would gain nothing. Measured in docs/design/cpu.md.
MIN_VERIFIED_TOKENS = 8
# On a CPU, 2 requests take almost as long as 8. Measured in docs/design/cpu.md.
MIN_DECODED_REQS = 8
# Sizes halfway between two powers of two. Such steps take long enough to be worth a program.
HALFWAY_REQS = (24, 48)
# The largest bucket of a program is at most this many times its smallest. A program computes its
# layers at the width of the step, and all else at its largest width. Up to this ratio, the layers
# take most of the time.
_WIDEST_RATIO = 4
# Forks copy a few blocks at a time. Three programs serve up to 512 copies.
MIN_COPIES = 8
COPIES_GROWTH = 8


def token_buckets(max_num_batched_tokens: int, *, verifies_drafts: bool = False) -> tuple[int, ...]:
    """Padded numbers of tokens: powers of two, and the largest step exactly.

    They begin with 16, or with 8 if steps verify drafts: such a step of one request has few tokens
    and no prompt. From 9 tokens on, at most half of a step is padding.

    Example: 48 -> (16, 32, 48).
    """
    smallest = MIN_VERIFIED_TOKENS if verifies_drafts else MIN_BATCHED_TOKENS
    return _growing(smallest, max_num_batched_tokens, growth=2)


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Padded numbers of requests in a burst: 1, powers of two from 8 on, 24, 48, and the largest.

    Example: 40 -> (1, 8, 16, 24, 32, 40).
    """
    powers = _growing(MIN_DECODED_REQS, max_num_seqs, growth=2)
    halfway = [num_reqs for num_reqs in HALFWAY_REQS if num_reqs < max_num_seqs]
    return tuple(sorted({1, *powers, *halfway}))


def copy_buckets(max_num_copies: int) -> tuple[int, ...]:
    """Padded numbers of block copies; the largest is exact. Example: 100 -> (8, 64, 100)."""
    return _growing(MIN_COPIES, max_num_copies, growth=COPIES_GROWTH)


def share_programs(buckets: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Groups neighboring buckets, in rising order. Each group is one program with these widths.

    A single row has a program of its own, without padding.

    Example: (1, 8, 16, 24, 32, 48, 64) -> ((1,), (8,), (16, 24, 32, 48, 64)).
    """
    groups: list[tuple[int, ...]] = []
    while buckets:
        smallest = -(-buckets[-1] // _WIDEST_RATIO)
        num_smaller = bisect.bisect_left(buckets, max(smallest, min(2, buckets[-1])))
        groups.insert(0, buckets[num_smaller:])
        buckets = buckets[:num_smaller]
    return tuple(groups)


def one_program_each(buckets: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Groups of one bucket each."""
    return tuple((bucket,) for bucket in buckets)


def _growing(smallest: int, largest: int, *, growth: int) -> tuple[int, ...]:
    """Numbers from `smallest` on, each `growth` times the one before; the last is `largest`."""
    counts = []
    count = smallest
    while count < largest:
        counts.append(count)
        count *= growth
    return (*counts, largest)
