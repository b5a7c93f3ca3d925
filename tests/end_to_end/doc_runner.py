"""Runs blocks of one page one after another; later blocks find the names of earlier ones.

A program of its own: JSON of `[[language, text], ...]` comes on stdin, and JSON of what each block
printed, and of its error or null, goes to stdout.
"""

import contextlib
import io
import json
import subprocess
import sys
import traceback


def main() -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    results = []
    for language, text in json.load(sys.stdin):
        if language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
            results.append((done.stdout, done.stderr or "failed" if done.returncode else None))
            continue
        printed, error = io.StringIO(), None
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(text, "<block>", "exec"), names)
            # It is the test that fails with it, and says which block this was.
            except Exception:
                error = traceback.format_exc()
        results.append((printed.getvalue(), error))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
