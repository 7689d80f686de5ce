"""A command run beside two busy processes, for `make test-busy`.

One burns a core a third of the time, the other streams through memory.
"""

import subprocess
import sys
import time
from multiprocessing import Process, parent_process

import numpy as np


def burn() -> None:
    while parent_process().is_alive():
        end = time.perf_counter() + 0.033
        while time.perf_counter() < end:
            pass
        time.sleep(0.067)


def stream() -> None:
    source = np.ones(32_000_000)
    target = np.empty_like(source)
    while parent_process().is_alive():
        np.copyto(target, source)


if __name__ == "__main__":
    busy = [Process(target=work, daemon=True) for work in (burn, stream)]
    for process in busy:
        process.start()
    sys.exit(subprocess.run(sys.argv[1:]).returncode)  # daemons end with this process
