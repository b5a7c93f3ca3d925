"""Operations on a paged KV cache: where a token goes, writing it there, attending, copying blocks.

The names below are the ops themselves, so a file of an op is reached with `from`:
`from pallas_kernels.paged_attention.cases import CASES`.
"""

from pallas_kernels.block_copy.api import block_copy
from pallas_kernels.cache_layout import pad_slot
from pallas_kernels.dispatch import IMPLEMENTATIONS, Implementation
from pallas_kernels.kv_scatter.api import kv_scatter
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.slot_mapping.api import slot_mapping

__all__ = [
    "IMPLEMENTATIONS",
    "Implementation",
    "block_copy",
    "kv_scatter",
    "pad_slot",
    "paged_attention",
    "slot_mapping",
]
