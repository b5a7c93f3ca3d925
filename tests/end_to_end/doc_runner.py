"""Runs the blocks of pages; later blocks of a page find the names of earlier ones.

A program of its own. Each line of stdin is JSON of one page: `[folder, environment, blocks,
limit_s]`, with blocks as `[[language, text], ...]`. The program forks a process for the page, which
runs the blocks in the folder. Then the program prints a line of JSON: `[[printed, error], ...]`,
one pair for each block, where `error` is null if the block did not fail. The line is `null` if the
process failed, or took longer than `limit_s`.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence

# Most pages with examples of clients import it, which takes a second. Forked processes share it.
import openai  # noqa: F401


def main() -> None:
    for line in sys.stdin:
        folder, environment, blocks, limit_s = json.loads(line)
        receiver, sender = os.pipe()
        pid = os.fork()
        if pid == 0:
            # The alarm ends this process, so that no later page gets the results of this one.
            signal.alarm(limit_s)
            os.setsid()
            os.close(receiver)
            # Blocks have no input: that of this program is the later pages.
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.chdir(folder)
            os.environ.update(environment)
            with open(sender, "w") as results:
                json.dump(run(blocks), results)
            return
        os.close(sender)
        with open(receiver) as results:
            found = results.read()
        _, status = os.waitpid(pid, 0)
        # What its blocks started and left behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
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
