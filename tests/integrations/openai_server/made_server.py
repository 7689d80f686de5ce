"""A small OpenAI-compatible HTTP server in a thread, honest unless it is told to fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "SmolLM2-135M-Instruct"
Answer = tuple[int, dict[str, str], bytes]


class OpenAIServer:
    """Serves one model at `url`; a context manager.

    answers  replaces the answer to a path: status, headers and body
    usage    changes the counts of an honest answer
    requests  (path, headers, body) of all requests so far
    """

    def __init__(
        self,
        answers: dict[str, Answer] | None = None,
        usage: Callable[[dict[str, Any]], Any] = lambda usage: usage,
        most_tokens: int = 4096,
    ) -> None:
        self.answers, self.usage, self.most_tokens = answers or {}, usage, most_tokens
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> OpenAIServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        if path in self.answers:
            return self.answers[path]
        if path == "/v1/models":
            entry = {"id": MODEL, "owned_by": "vllm", "max_model_len": self.most_tokens}
            return _json({"object": "list", "data": [entry]})
        if path == "/version":
            return _json({"version": "0.32.0"})
        if path == "/v1/completions":
            return self._completion(body)
        return 404, {}, b'{"detail":"Not Found"}'

    def _completion(self, body: dict[str, Any]) -> Answer:
        count, tokens = len(body["prompt"]), body["max_tokens"]
        usage = self.usage({"prompt_tokens": count, "completion_tokens": tokens})
        if not body.get("stream"):
            return _json({"choices": [{"text": "a"}], "usage": usage})
        events: list[dict[str, Any]] = [{"choices": [{"text": "a"}]}] * tokens
        events = [*events, {"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return 200, {}, ("".join(lines) + "data: [DONE]\n\n").encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply({})

            def do_POST(self) -> None:
                self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _reply(self, body: dict[str, Any]) -> None:
                server.requests.append((self.path, dict(self.headers), body))
                status, headers, content = server.answer(self.path, body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *parts: object) -> None: ...

        return Handler


def _json(value: Any) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
