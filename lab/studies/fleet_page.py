"""The output of `rooftree calibrate --fleet` on a local Ray cluster of two CPU nodes.

    python -m lab.studies.fleet_page    # runs it, stores it, and puts it into docs/planning.md

The nodes have one and two CPUs of this machine, which makes two kinds of node. The target is the
demo model. The times are real but of this machine alone; they show the command at work, not the
speed of a fleet.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import tempfile
from pathlib import Path
from unittest import mock

from decoder.model.demo_model import ensure_demo_model
from lab.studies.common import RESULTS, environment, store
from lab.studies.planning_page import PAGE
from profiler.cli import run

COMMAND = (
    "rooftree calibrate --fleet --target HuggingFaceTB/SmolLM2-135M-Instruct"
    " --contexts 64,256 --max-nodes 15"
)
RESULT = RESULTS / "fleet_page.json"
BLOCK = re.compile(r"```console\n\$ (rooftree calibrate --fleet.*?[^\\])\n(.*?)```", re.DOTALL)


def measure() -> str:
    """Start the nodes, run the command, and return its output of both streams."""
    from ray.cluster_utils import Cluster

    target = ensure_demo_model()
    shown = io.StringIO()
    root = str(Path(__file__).parents[2])
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        home = Path(folder, "home")
        variables = {"ROOFTREE_HOME": str(home), "TMPDIR": folder, "PYTHONPATH": root}
        with mock.patch.dict(os.environ, variables | {"RAY_USAGE_STATS_ENABLED": "0"}):
            os.environ.pop("OMP_NUM_THREADS", None)  # nodes take as many threads as CPUs
            tempfile.tempdir = None
            cluster = Cluster()
            try:
                for cpus in (1, 2):
                    cluster.add_node(num_cpus=cpus, object_store_memory=80_000_000)
                words = shlex.split(COMMAND)[1:]
                words[words.index("--target") + 1] = str(target)
                words += ["--fleet-address", cluster.address]
                with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
                    code = run(words)
            finally:
                cluster.shutdown()
        if code:
            raise SystemExit(shown.getvalue())
        return shown.getvalue().replace(str(home), "~/.local/share/rooftree")


def with_output(text: str) -> str:
    """`text` with the stored output below the command; nothing below it without a stored run."""
    stored = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    output = stored.get("output", "")
    return BLOCK.sub(lambda m: f"```console\n$ {m[1]}\n{output}```", text)


def main() -> None:
    store(
        "fleet_page", {"environment": environment("cpu"), "command": COMMAND, "output": measure()}
    )
    PAGE.write_text(with_output(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
