"""Which batches torch's attention is timed on; the measuring itself needs torch, this does not."""

from benchmarks.ops.gpu_attention_speed import DECODE, RAGGED, AttentionSizes, rehearsal_sizes
from benchmarks.ops.gpu_peers_jax import uniform_sizes
from benchmarks.ops.gpu_units import Unit

_MODULE = "benchmarks.ops.gpu_peers_torch"


def units(*, is_rehearsal: bool) -> list[Unit]:
    """SDPA on every uniform batch; FlexAttention where its kernels take the block size."""
    uniform = uniform_sizes()[::5] if is_rehearsal else uniform_sizes()
    sdpa = [("torch sdpa", "measure_sdpa", sizes) for sizes in uniform]
    flex = [
        ("torch flex", "measure_flex", sizes)
        for sizes in (*DECODE, *RAGGED)
        if sizes.block_size == 64 and sizes.sliding_window is None
    ]
    return [
        _unit(body, function, rehearsal_sizes(sizes) if is_rehearsal else sizes)
        for body, function, sizes in sdpa + flex
    ]


def _unit(body: str, function: str, sizes: AttentionSizes) -> Unit:
    num_query, seq_len = sizes.requests[0]
    names = ("num_q_heads", "num_kv_heads", "head_dim")
    options = {
        "num_reqs": len(sizes.requests),
        "num_query": num_query,
        "seq_len": seq_len,
        **{name: getattr(sizes, name) for name in names},
    }
    if body == "torch flex":
        options["block_size"] = sizes.block_size
    return Unit(
        kind="time",
        op="paged_attention",
        case=sizes.case,
        body=body,
        measure=f"{_MODULE}:{function}",
        options=options,
        num_bytes=sizes.num_bytes,
        num_flops=sizes.num_flops,
        # Its kernel is searched for and compiled in the unit.
        silence_limit_s=100.0 if body == "torch flex" else 60.0,
    )
