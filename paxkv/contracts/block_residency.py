"""How long KV blocks stay: histograms that the engine counts and the server shows."""

import dataclasses

# Upper bounds of all buckets but the last, which has none. A block may live for milliseconds in
# a full pool, or for an hour in an idle one.
RESIDENCY_BUCKETS_S = (
    (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
    + (10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyHistogram:
    """Durations in seconds, counted since the start.

    Args:
        bucket_counts: Durations in each bucket alone, one more than `RESIDENCY_BUCKETS_S`.
        sum_s: Sum of all durations.
    """

    bucket_counts: tuple[int, ...] = (0,) * (len(RESIDENCY_BUCKETS_S) + 1)
    sum_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockResidency:
    """Of a sample of the blocks handed out.

    Args:
        lifetime: From being handed out until its content is forgotten or overwritten.
        idle_before_evict: The last part of that, in which nobody held it.
        reuse_gap: From one use to the next: from being handed out, or hit, to the next hit.
    """

    lifetime: ResidencyHistogram = ResidencyHistogram()
    idle_before_evict: ResidencyHistogram = ResidencyHistogram()
    reuse_gap: ResidencyHistogram = ResidencyHistogram()
