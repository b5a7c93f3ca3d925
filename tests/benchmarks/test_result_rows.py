"""A row names the processor; `units/test_run.py` has its other fields."""

from benchmarks import result_rows


def test_processors_of_one_name_have_different_descriptions() -> None:
    first = "model name : EPYC\ncpu family : 26\nmodel : 2\nflags : avx2 avx512f\n"
    name = result_rows._name_in_cpuinfo(first + "\nmodel name : the second one")
    assert name == "EPYC (family 26 model 2, AVX-512)"
    assert result_rows._name_in_cpuinfo("CPU implementer : 0x41\nbogomips") is None
