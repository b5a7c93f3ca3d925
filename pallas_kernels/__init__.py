"""Operations on a paged KV cache and on states of requests, and products of grouped rows.

`pallas_kernels.paged_attention` is the op, not its folder. To import from the folder, use `from`:
`from pallas_kernels.paged_attention.cases import CASES`.
"""

from pallas_kernels.block_copy.api import block_copy
from pallas_kernels.block_gather.api import block_gather
from pallas_kernels.block_scatter.api import block_scatter
from pallas_kernels.cache_layout import pad_slot
from pallas_kernels.causal_conv1d.api import causal_conv1d
from pallas_kernels.dispatch import IMPLEMENTATIONS, Implementation
from pallas_kernels.gated_delta_rule.api import gated_delta_rule
from pallas_kernels.gated_delta_step.api import gated_delta_step
from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_matmul_body
from pallas_kernels.grouped_matmul.group_tiles import (
    GroupTiles,
    choose_tile_rows,
    make_group_tiles,
    tile_row_choices,
)
from pallas_kernels.index_top_k.api import NO_POSITION, index_top_k
from pallas_kernels.kv_scatter.api import kv_scatter
from pallas_kernels.latent_attention.api import latent_attention
from pallas_kernels.merge_attention_states.api import merge_attention_states
from pallas_kernels.number_format import NumberFormat
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_states import PagedStates
from pallas_kernels.rg_lru_scan.api import rg_lru_scan
from pallas_kernels.scaled_grouped_matmul.api import (
    scaled_grouped_matmul,
    scaled_grouped_matmul_body,
)
from pallas_kernels.scaled_matmul.api import scaled_matmul, scaled_matmul_body
from pallas_kernels.selective_scan.api import selective_scan
from pallas_kernels.selective_step.api import selective_step
from pallas_kernels.slot_mapping.api import slot_mapping
from pallas_kernels.sparse_latent_attention.api import sparse_latent_attention
from pallas_kernels.sparse_paged_attention.api import sparse_paged_attention
from pallas_kernels.ssd_scan.api import ssd_scan
from pallas_kernels.ssd_step.api import ssd_step
from pallas_kernels.target import Target, default_target, target_of

__all__ = [
    "IMPLEMENTATIONS",
    "GroupTiles",
    "Implementation",
    "NO_POSITION",
    "NumberFormat",
    "PagedStates",
    "Target",
    "block_copy",
    "block_gather",
    "block_scatter",
    "causal_conv1d",
    "choose_tile_rows",
    "default_target",
    "gated_delta_rule",
    "gated_delta_step",
    "grouped_matmul",
    "kv_scatter",
    "index_top_k",
    "make_group_tiles",
    "merge_attention_states",
    "latent_attention",
    "pad_slot",
    "paged_attention",
    "grouped_matmul_body",
    "rg_lru_scan",
    "scaled_grouped_matmul",
    "scaled_grouped_matmul_body",
    "scaled_matmul",
    "scaled_matmul_body",
    "selective_scan",
    "selective_step",
    "slot_mapping",
    "sparse_latent_attention",
    "sparse_paged_attention",
    "ssd_scan",
    "ssd_step",
    "target_of",
    "tile_row_choices",
]
