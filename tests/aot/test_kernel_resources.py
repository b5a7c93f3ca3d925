"""The number of CTAs of a kernel that an H200's multiprocessor holds at once."""

import pytest

from tests.aot.kernel_resources import KernelResources


def resources(*, registers, num_threads, shared_bytes):
    return KernelResources(
        name="kernel",
        registers=registers,
        stack_bytes=0,
        spill_store_bytes=0,
        spill_load_bytes=0,
        barriers=1,
        num_threads=num_threads,
        shared_bytes=shared_bytes,
        remarks=(),
    )


# Worked out by hand. An SM has 65,536 registers, 2,048 threads and 233,472 bytes of shared memory.
# Every CTA takes 1,024 bytes of shared memory in addition to its own.
@pytest.mark.parametrize(
    ("registers", "num_threads", "shared_bytes", "wanted"),
    [
        (232, 256, 117_760, 1),  # 59,392 registers
        (128, 256, 81_920, 2),  # 32,768 registers; shared memory for 2.8
        (129, 256, 81_920, 1),  # a warp's registers are rounded up to 4,352: 34,816
        (128, 256, 114_688, 2),  # 231,424 bytes
        (128, 256, 115_712, 2),  # 233,472 bytes, all there is
        (128, 256, 115_713, 1),
        (128, 256, 147_456, 1),
        (168, 384, 0, 1),  # 64,512 registers
        (16, 128, 0, 16),  # 2,048 threads
    ],
)
def test_ctas_are_limited_by_the_scarcest_resource(registers, num_threads, shared_bytes, wanted):
    kernel = resources(registers=registers, num_threads=num_threads, shared_bytes=shared_bytes)
    assert kernel.ctas_per_sm == wanted
