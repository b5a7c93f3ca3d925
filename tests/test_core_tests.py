"""`tests/core_tests.txt`, what CI also runs with other versions of JAX, names each kernel body."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE_TESTS = (ROOT / "tests/core_tests.txt").read_text(encoding="utf-8").splitlines()
# These files test the plain bodies of an op, or a body of several ops.
REFERENCE, PAGED_STATES, STATE_TILES = (
    f"{name}.py::" for name in ("/test_reference", "/test_paged_states", "/test_state_tiles")
)
FILES_OF_XLA = {
    **dict.fromkeys(("scaled_matmul", "scaled_grouped_matmul"), REFERENCE),
    **dict.fromkeys(("gated_delta_step", "selective_step", "ssd_step"), PAGED_STATES),
}
# Its tests compile no kernel.
PLAN_OF_TPU = "test_mosaic_tpu_plan.py"


@pytest.mark.parametrize("op", sorted(p.parent.name for p in ROOT.glob("pallas_kernels/*/api.py")))
def test_the_bodies_of_an_op_are_run(op):
    names = {
        "xla": FILES_OF_XLA.get(op, "xla"),
        "mosaic_gpu": STATE_TILES if FILES_OF_XLA.get(op) == PAGED_STATES else "/test_mosaic_gpu",
        "mosaic_tpu": "/test_mosaic_tpu",
    }
    bodies = [body for body in names if (ROOT / f"pallas_kernels/{op}/{body}.py").exists()]
    lines = [line for line in CORE_TESTS if f"/{op}/" in line or f"[{op}-" in line]
    assert bodies
    assert [body for body in bodies if not any(names[body] in line for line in lines)] == []


def test_each_file_of_a_kernel_has_a_line():
    files = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.glob("tests/pallas_kernels/*/test_mosaic_*.py")
        if path.name != PLAN_OF_TPU
    }
    assert files - {line.partition("::")[0] for line in CORE_TESTS} == set()


def test_each_line_names_a_test():
    """pytest checks the names of cases, with a JAX that has all of them."""
    for line in CORE_TESTS:
        file, _, rest = line.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {rest.partition('[')[0]}(" in text if rest else "def test_" in text, line
    assert len(set(CORE_TESTS)) == len(CORE_TESTS)
