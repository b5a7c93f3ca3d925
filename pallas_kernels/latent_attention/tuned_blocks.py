"""How the GPU kernel of decode rows cuts its work; all numbers are guesses, none is measured."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDecodeConfig:
    """What can be chosen without changing the result.

    Args:
        num_sms: CTAs that can run at once; one takes a whole SM, because of its shared memory.
        min_share: Fewest tiles of 64 tokens in a share. A share more costs a query tile read (72
            KiB), a partial result written and read again (128 KiB each); a tile is 72 KiB.
        merge_columns: Columns that one CTA of the merge computes: 16, 32 or 64.
        merge_batch: Partial results that it reads together. A long request alone on the GPU has one
            a share, 132; to wait for each in turn could take longer than attention.
    """

    num_sms: int
    min_share: int
    merge_columns: int
    merge_batch: int


# An H100 or H200 in SXM form has 132 SMs. With fewer there is a second wave: slower, not wrong.
DEFAULT_CONFIG = LatentDecodeConfig(num_sms=132, min_share=2, merge_columns=32, merge_batch=8)


def num_shares(config: LatentDecodeConfig, num_head_tiles: int, max_units: int) -> int:
    """Shares that the list of tiles is cut into: the rule of the split, on static shapes alone.

    One CTA computes one share for 64 heads, so that all CTAs together fill the SMs once; but no
    more shares than there can be tiles for.

    Args:
        num_head_tiles: Groups of 64 query heads, each of which reads the whole cache.
        max_units: Most tiles of 64 tokens that the batch can have.
    """
    filling = config.num_sms // num_head_tiles
    return max(1, min(filling, -(-max_units // config.min_share)))
