"""A command run beside two busy processes, for `make test-busy`.

One burns a core a third of the time, the other streams through memory.
"""

import os
import subprocess
import sys
import time
from multiprocessing import Process

import numpy as np


def burn(parent: int) -> None:
    """Burn a core a third of the time."""
    while os.getppid() == parent:
        end = time.perf_counter() + 0.033
        while time.perf_counter() < end:
            pass
        time.sleep(0.067)


def stream(parent: int) -> None:
    """Copy 256 MB arrays."""
    source = np.ones(32_000_000)
    target = np.empty_like(source)
    while os.getppid() == parent:
        np.copyto(target, source)


if __name__ == "__main__":
    busy = [Process(target=work, args=(os.getpid(),), daemon=True) for work in (burn, stream)]
    for process in busy:
        process.start()
    sys.exit(subprocess.run(sys.argv[1:]).returncode)  # daemons end with this process
