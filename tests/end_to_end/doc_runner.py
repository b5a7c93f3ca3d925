"""Runs the blocks of pages; later blocks of a page find the names of earlier ones.

A program of its own. Each line of stdin is JSON of one page: `[folder, environment, blocks]`, with
blocks as `[[language, text], ...]`. A process that is forked for the page runs its blocks in the
folder. For each page, a line goes to stdout: JSON of what each block printed, and of its error or
null. It is null if the process of the page failed.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence

# Importing it takes a second, and most pages of clients use it: here once for all of them.
import openai  # noqa: F401


def main() -> None:
    for line in sys.stdin:
        folder, environment, blocks = json.loads(line)
        receiver, sender = os.pipe()
        if os.fork() == 0:
            os.close(receiver)
            os.chdir(folder)
            os.environ.update(environment)
            with open(sender, "w") as results:
                json.dump(run(blocks), results)
            return
        os.close(sender)
        with open(receiver) as results:
            found = results.read()
        _, status = os.wait()
        print("null" if status else found, flush=True)


def run(blocks: Sequence[tuple[str, str]]) -> list[tuple[str, str | None]]:
    names: dict[str, object] = {"__name__": "__main__"}
    results = []
    for language, text in blocks:
        if language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                stdin=subprocess.DEVNULL,
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
    return results


if __name__ == "__main__":
    main()
