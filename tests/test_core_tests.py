"""`tests/core_tests.txt`, what CI also runs with other versions of JAX, names each kernel body."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE_TESTS = (ROOT / "tests/core_tests.txt").read_text(encoding="utf-8").splitlines()
BODIES = ("xla", "mosaic_gpu", "mosaic_tpu")
# Files that test a body and do not have its name.
OTHER_FILES = {
    "xla": ("test_paged_states.py", "test_reference.py"),
    "mosaic_gpu": ("test_state_tiles.py",),
}


@pytest.mark.parametrize("op", sorted(path.parent.name for path in ROOT.glob("*kernels/*/api.py")))
def test_each_body_is_run(op):
    bodies = [body for body in BODIES if (ROOT / f"pallas_kernels/{op}/{body}.py").exists()]
    own = [line for line in CORE_TESTS if f"/{op}/" in line or f"[{op}-" in line]
    missing = [
        body
        for body in bodies
        if not any(name in line for line in own for name in (body, *OTHER_FILES.get(body, ())))
    ]
    assert bodies
    assert missing == []


def test_each_line_names_a_test():
    """pytest checks the names of cases, with a JAX that has all of them."""
    for line in CORE_TESTS:
        file, _, rest = line.partition("::")
        assert f"def {rest.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8")
    assert len(set(CORE_TESTS)) == len(CORE_TESTS)
