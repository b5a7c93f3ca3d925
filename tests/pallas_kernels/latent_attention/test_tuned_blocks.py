"""Tests of `latent_attention/tuned_blocks.py`: the rule that says how many shares there are."""

import pytest

from pallas_kernels.latent_attention.tuned_blocks import LatentDecodeConfig, num_shares

CONFIG = LatentDecodeConfig(num_sms=132, min_share=2, merge_columns=32, merge_batch=8)


@pytest.mark.parametrize(
    ("num_head_tiles", "max_units", "wanted"),
    [
        (1, 8192, 132),  # 64 requests of 8,192 tokens, up to 64 heads: every SM has one share
        (2, 8192, 66),  # 128 heads: two CTAs for each share
        (1, 100, 50),  # shares of two tiles each
        (1, 1, 1),
        (200, 8192, 1),  # more head tiles than SMs
    ],
)
def test_shares_fill_the_sms_once_and_are_not_tiny(num_head_tiles, max_units, wanted):
    assert num_shares(CONFIG, num_head_tiles, max_units) == wanted
