"""What is read off a compiled program: kernels outside the loop, and copies of a cache."""

from benchmarks.ops.gpu_compile import large_copies, num_hoisted

PROGRAM = """
%body (p: (s32[])) -> (s32[]) {
  %k = bf16[64,32,128]{2,1,0} custom-call(%a), custom_call_target="mosaic_gpu_v2"
  %c = bf16[2,4097,8,16,128]{4,3,2,1,0} copy(%cache)
}

ENTRY %main (p: s32[]) -> s32[] {
  %small = f32[64,32]{1,0} copy(%lse)
  %whole = f32[4096,8192]{1,0} copy-start(%x)
  %h = bf16[64,32,128]{2,1,0} custom-call(%a), custom_call_target="mosaic_gpu_v2"
}
"""


def test_kernels_of_the_entry_are_outside_the_loop() -> None:
    assert num_hoisted(PROGRAM) == 1


def test_copies_of_a_caches_size_are_found() -> None:
    assert large_copies(PROGRAM) == ["bf16[2,4097,8,16,128]", "f32[4096,8192]"]
