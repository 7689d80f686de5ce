"""Stands in for an interpreter with llama.cpp: speaks as `worker.py` does, and fails as told.

It writes one token over and over. Its option `fails` says how its speculating arm ends at its third
text (the first is the warm-up's): exits, killed, stops; or `start`. `late` leaves out ids.
"""

import json
import os
import signal
import sys

TOKEN = 3


def look() -> None:
    package = sys.argv[3]
    found = {"found": package == "xllamacpp", "exports": False, "prefix": "/nowhere"}
    print(json.dumps(found | {"versions": {"xllamacpp": "1.2.3"}}))


def fail(how: str, new_tokens: int) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    print(json.dumps([TOKEN] * (new_tokens // 2)), flush=True)
    if how == "exits":
        print("a line before\nMemoryError: no room", file=sys.stderr)
        sys.exit(7)
    print("{}", flush=True)


def serve() -> None:
    engine, options = sys.argv[2], json.loads(sys.argv[3])
    how = options["arguments"].get("fails") if options["mode"] is not None else None
    assert engine == "llama.cpp" and options["context"] > 0 and options["dtype"] == "float32"
    assert TOKEN not in options["ends"]
    if how == "start":
        sys.exit("RuntimeError: cannot load the model")
    print("{}", flush=True)
    for number, line in enumerate(sys.stdin, 1):
        new_tokens = json.loads(line)["new_tokens"]
        if how in ("exits", "killed", "stops") and number == 3:
            fail(how, new_tokens)
            continue
        late = options["arguments"].get("late")
        print(json.dumps([TOKEN]), flush=True)
        print(json.dumps(([None] if late else [TOKEN]) + [TOKEN] * (new_tokens - 2)), flush=True)
        print(json.dumps({"text": [TOKEN] * new_tokens} if late else {}), flush=True)


if __name__ == "__main__":
    look() if sys.argv[1] == "-c" else serve()
