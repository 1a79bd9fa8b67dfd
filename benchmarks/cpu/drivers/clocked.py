"""Runs a command and adds to its output a last line with its wall time, exit code and peak memory.

It stands between the benchmark and each timed program, so that time spent waiting for a quiet machine does not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

MARK = "CLOCKED "


def main() -> None:
    start = time.monotonic()
    process = subprocess.Popen(sys.argv[1:])
    _, status, usage = os.wait4(process.pid, 0)
    found = {
        "wall_s": time.monotonic() - start,
        "exit_code": os.waitstatus_to_exitcode(status),
        "peak_rss_bytes": usage.ru_maxrss * 1024,  # Linux counts in KiB
    }
    print(f"\n{MARK}{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
