"""How the GPU kernel of decode rows cuts its work. All numbers are guesses, not measured."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDecodeConfig:
    """Choices that change the speed, but not the result.

    Args:
        num_sms: CTAs that can run at once. The shared memory of a CTA fills a whole SM.
        min_share: The fewest tiles of 64 tokens (72 KiB each) in a share. Each share also reads a
            query tile (72 KiB), and writes a partial result (128 KiB) that the merge reads.
        merge_columns: Columns that one CTA of the merge computes: 16, 32 or 64.
        merge_batch: Partial results that one CTA reads together. A long request alone on the GPU
            has 132, one per share. Reading them one by one could take longer than attention.
    """

    num_sms: int
    min_share: int
    merge_columns: int
    merge_batch: int


# An H100 or H200 in SXM form has 132 SMs. With fewer SMs there is a second wave, which is slower
# but correct.
DEFAULT_CONFIG = LatentDecodeConfig(num_sms=132, min_share=2, merge_columns=32, merge_batch=8)


def num_shares(config: LatentDecodeConfig, num_head_tiles: int, max_units: int) -> int:
    """The number of shares that the list of tiles is cut into, from static shapes alone.

    One CTA computes one share for 64 heads. All CTAs together fill the SMs once, but there are
    never more shares than tiles.

    Args:
        num_head_tiles: Groups of 64 query heads, each of which reads the whole cache.
        max_units: The most tiles of 64 tokens that the batch can have.
    """
    filling = config.num_sms // num_head_tiles
    return max(1, min(filling, -(-max_units // config.min_share)))
