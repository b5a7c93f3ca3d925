"""Lines of the log have a time in UTC."""

import logging
import subprocess
import sys

from paxkv.entrypoints.process_logging import UtcFormatter

PROGRAM = """
import logging
from paxkv.entrypoints.process_logging import set_up_logging
set_up_logging()
logging.getLogger("paxkv.part").info("began")
logging.getLogger("other").info("not ours")
logging.getLogger("other").warning("heed")
"""


def test_time_is_in_utc_with_milliseconds():
    record = logging.LogRecord("a", logging.INFO, "f", 1, "said %d", (3,), None)
    record.created = 1_700_000_000.0071
    formatter = UtcFormatter("%(asctime)s %(message)s")
    assert formatter.format(record) == "2023-11-14T22:13:20.007Z said 3"


def test_log_shows_paxkvs_information_and_warnings_of_others():
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env={"TZ": "Asia/Tokyo", "PYTHONPATH": "."},
        timeout=120,
    )
    times, rest = zip(*(line.split(" ", 1) for line in ran.stderr.splitlines()), strict=True)
    assert rest == ("INFO paxkv.part: began", "WARNING other: heed")
    assert all(time[10] == "T" and time.endswith("Z") for time in times)
