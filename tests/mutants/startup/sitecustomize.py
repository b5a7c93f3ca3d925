"""Measures coverage in every process of `mutants coverage`: pytest, its workers and their children.

Python imports a module of this name when it starts. The folder is on PYTHONPATH only in runs that
`tests.mutants` starts, and the module does nothing unless the run measures coverage.
"""

import atexit
import os
import threading
import time

# A process that is killed loses what it has not saved.
_SAVE_EVERY_S = 2.0


def _measure(config_file: str) -> None:
    import coverage

    measured = coverage.Coverage(config_file=config_file, data_suffix=True)
    measured.start()
    # Set for the children of a test by `mutants_plugin`.
    measured.switch_context(os.environ.get("MUTANTS_CONTEXT", ""))
    started_pid, exit_now = os.getpid(), os._exit

    def save() -> None:
        # A fork would write what its parent writes too.
        if os.getpid() == started_pid:
            measured.save()

    def save_and_exit(code: int) -> None:
        save()
        exit_now(code)

    def save_regularly() -> None:
        while True:
            time.sleep(_SAVE_EVERY_S)
            save()

    os._exit = save_and_exit
    atexit.register(save)
    if "MUTANTS_CONTEXT" in os.environ:
        threading.Thread(target=save_regularly, daemon=True).start()


if "MUTANTS_COVERAGE_CONFIG" in os.environ:
    _measure(os.environ["MUTANTS_COVERAGE_CONFIG"])
