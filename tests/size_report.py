"""Prints files and functions that are longer than the style guide aims at. Sizes fail no test.

python tests/size_report.py
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("paxkv", "pallas_kernels", "models", "benchmarks", "tests")
# Copies that are kept equal to their origin.
EXCLUDED = {ROOT / "tests" / "oracles" / "families.py"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80


def num_function_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: the contract of an op may take its page."""
    first, docstring = function.body[0], ast.get_docstring(function)
    num_docstring_lines = 0 if docstring is None else first.end_lineno - first.lineno + 1
    return function.end_lineno - function.lineno + 1 - num_docstring_lines


def long_parts(path: Path) -> list[str]:
    """One line for a file over the limit, and one for each such function in it."""
    text, name = path.read_text(), path.relative_to(ROOT).as_posix()
    num_lines = len(text.splitlines())
    found = [f"{num_lines:5} lines  {name}"] if num_lines > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            num_lines = num_function_lines(node)
            if num_lines > MAX_FUNCTION_LINES:
                found.append(f"{num_lines:5} lines  {name}: {node.name}")
    return found


def main() -> None:
    paths = [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]
    long = [part for path in paths if path not in EXCLUDED for part in long_parts(path)]
    print(f"files over {MAX_FILE_LINES} lines and functions over {MAX_FUNCTION_LINES}: {len(long)}")
    print("\n".join(long))
    for package in PACKAGES:
        counted = [p for p in paths if p.is_relative_to(ROOT / package) and p not in EXCLUDED]
        num_lines = sum(len(path.read_text().splitlines()) for path in counted)
        print(f"{num_lines:7} lines in {len(counted):4} files of {package}")


if __name__ == "__main__":
    main()
