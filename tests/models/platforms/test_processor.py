"""What the processor can do is read where Linux says it."""

import pytest

from models.platforms import processor

X86 = """\
processor\t: 0
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx2

processor\t: 1
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx2 another
"""
ARM = """\
processor\t: 0
Features\t: fp asimd
"""


@pytest.fixture
def cpuinfo(tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(processor, "_CPUINFO", path)
    processor._first_processor.cache_clear()
    yield path
    processor._first_processor.cache_clear()


def test_instruction_sets_are_read_from_the_first_processor(cpuinfo):
    cpuinfo.write_text(X86)
    assert processor.instruction_sets() == {"fpu", "sse2", "avx2"}
    assert processor.processor_identity().startswith("AMD EPYC, instruction sets ")


def test_arm_calls_them_features(cpuinfo):
    cpuinfo.write_text(ARM)
    assert processor.instruction_sets() == {"fp", "asimd"}


def test_another_system_says_nothing(cpuinfo):
    assert processor.instruction_sets() == frozenset()
    assert processor.processor_identity()


def test_identity_depends_on_instruction_sets_and_not_on_their_order(cpuinfo):
    def identity(flags: str) -> str:
        cpuinfo.write_text(X86.replace("fpu sse2 avx2\n\n", f"{flags}\n\n"))
        processor._first_processor.cache_clear()
        return processor.processor_identity()

    assert identity("fpu avx2") == identity("avx2 fpu") != identity("fpu avx2 avx512f")


@pytest.mark.parametrize(
    ("nproc", "expected"), [(None, 4), ("1", 1), ("4", 4), ("64", 4), ("0", 4), ("many", 4)]
)
def test_xla_computes_with_every_core_unless_nproc_is_set(monkeypatch, nproc, expected):
    monkeypatch.setattr(processor, "num_cores", lambda: 4)
    monkeypatch.delenv("NPROC", raising=False)
    if nproc is not None:
        monkeypatch.setenv("NPROC", nproc)
    assert processor.num_threads() == expected
