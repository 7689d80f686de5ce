"""A client of an OpenAI-compatible server: timed completions of token ids, whole or streamed.

It talks to the given address only: redirects are refused, and proxies are not used. Requests,
prompt tokens and time are bounded. Every fault is a MeasurementError or InputError.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier, Lock
from typing import Any
from urllib.parse import urlsplit

import httpx
from httpx_sse import EventSource, SSEError

from costmodel.errors import InputError, MeasurementError, RooftreeError, reason_of, shown
from costmodel.io import NotJson, parse_json

MOST_ANSWER_BYTES = 8_000_000
# Where servers tell their version, by the owner that they give their models.
VERSIONS = {
    "vllm": ("vllm", "/version", "version"),
    "sglang": ("sglang", "/get_server_info", "version"),
    "llamacpp": ("llama.cpp", "/props", "build_info"),
}
NO_API = (
    "Give the address of an OpenAI-compatible server, without a path, as http://127.0.0.1:8000."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Scheme, host and port of a server."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> Address:
        """The address in http://HOST:PORT, with or without /v1. Raises InputError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InputError(f"{shown(url)} is no address: {error}", hint=NO_API) from None
        known = parts.scheme in ("http", "https") and parts.hostname
        if not known or parts.path.rstrip("/") not in ("", "/v1") or "@" in parts.netloc:
            raise InputError(f"{shown(url)} is no address of a server", hint=NO_API)
        usual = 443 if parts.scheme == "https" else 80
        return cls(scheme=parts.scheme, host=str(parts.hostname), port=port or usual)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def local(self) -> bool:
        """Whether it is this machine."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Bounds of all requests to a server together, and the longest silence within one."""

    requests: int = 20_000
    prompt_tokens: int = 50_000_000
    seconds: float = 3600.0
    silence_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that a server offers.

    root         the folder or hub id that its weights are from, where told
    most_tokens  of a prompt with its answer, where told
    """

    name: str
    root: str = ""
    most_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Seconds from the request to the whole answer, and the prompt's cached tokens where told."""

    seconds: float
    cached_tokens: int | None = None


class ServerClient:
    """Timed requests to one server."""

    def __init__(
        self,
        address: Address,
        *,
        api_key: str | None = None,
        limits: RequestLimits = RequestLimits(),
        now_s: Callable[[], float] = time.perf_counter,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """transport: in place of a network, for tests"""
        self.address, self.model = address, ""
        self._limits, self._now_s = limits, now_s
        # No proxies, no .netrc, no redirects; open connections are kept.
        self._http = httpx.Client(
            base_url=str(address),
            headers={"Accept-Encoding": "identity"}
            | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"}),
            timeout=limits.silence_s,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            transport=transport,
        )
        self._lock = Lock()
        self._requests = self._prompt_tokens = 0
        self._end_s = now_s() + limits.seconds

    @property
    def requests(self) -> int:
        """Requests so far."""
        return self._requests

    def models(self) -> tuple[list[ServedModel], str]:
        """The models on offer, and the server's name and version as far as it tells them."""
        answer = self._get("/v1/models")
        entries = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise InputError(f"{self.address} does not speak the OpenAI API", hint=NO_API)
        # An entry with a parent is an adapter over another one's weights.
        models = [
            _model(entry)
            for entry in entries
            if isinstance(entry.get("id"), str) and not entry.get("parent")
        ]
        owners = {str(entry.get("owned_by")) for entry in entries}
        owner = owners.pop() if len(owners) == 1 else ""
        name, path, field = VERSIONS.get(owner, ("unknown", "", ""))
        if path:
            with contextlib.suppress(InputError, MeasurementError):
                answer = self._get(path)
                if isinstance(answer, dict) and isinstance(answer.get(field), str):
                    name = f"{name}-{answer[field]}"[:80]
        return models, name

    def complete(self, prompt: Sequence[int], tokens: int = 1) -> Completion:
        """So many tokens after a prompt of token ids."""
        body = self._body(prompt, tokens)
        start_s = self._now_s()
        with self._answer("POST", "/v1/completions", body) as response:
            content = response.read()
            seconds = self._now_s() - start_s
        answer = self._parsed(content)
        usage = answer.get("usage") if isinstance(answer, dict) else None
        self._check_usage(usage, len(prompt), tokens)
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return Completion(seconds=seconds, cached_tokens=cached if _is_count(cached) else None)

    def stream(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[float]]:
        """The times at which each prompt's tokens arrive, all prompts sent at once."""
        together = Barrier(len(prompts))

        def one(prompt: Sequence[int]) -> list[float]:
            try:
                return self._stream(prompt, tokens, together)
            except BaseException:
                together.abort()
                raise

        with ThreadPoolExecutor(len(prompts)) as pool:
            running = [pool.submit(one, prompt) for prompt in prompts]
            errors = [error for future in running if (error := future.exception())]
        for error in sorted(errors, key=lambda error: not isinstance(error, RooftreeError)):
            raise error  # a broken barrier is only the others' answer to the first fault
        return [future.result() for future in running]

    def _stream(self, prompt: Sequence[int], tokens: int, together: Barrier) -> list[float]:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = self._body(prompt, tokens, options)
        arrivals: list[tuple[float, bool]] = []  # and whether there is text
        usage = None
        together.wait(self._limits.silence_s)
        with self._answer("POST", "/v1/completions", body) as response:
            for event in self._events(response):
                if choices := event.get("choices"):
                    arrivals.append((self._now_s(), any(one.get("text") for one in choices)))
                usage = event.get("usage") or usage
        self._check_usage(usage, len(prompt), tokens)
        # A token may have no text of its own; chunks beyond the tokens open or end the stream.
        while len(arrivals) > tokens and not arrivals[0][1]:
            del arrivals[0]
        return [time_s for time_s, _ in arrivals[:tokens]]

    def _events(self, response: httpx.Response) -> Iterator[dict[str, Any]]:
        """The objects of a stream of server-sent events. Raises MeasurementError for an error."""
        response.headers["content-type"] = "text/event-stream"  # some servers name none
        for sent in EventSource(response).iter_sse():
            if sent.data.strip() == "[DONE]":
                return
            event = self._parsed(sent.data)
            if isinstance(event, dict):
                if sent.event == "error" or event.get("error"):
                    raise MeasurementError(f"{self.address} answers: {_said(sent.data)}")
                yield event

    def _body(
        self, prompt: Sequence[int], tokens: int, options: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        self._count(len(prompt))
        fields = {"model": self.model, "prompt": list(prompt), "max_tokens": tokens}
        return fields | {"temperature": 0, "ignore_eos": True} | dict(options or {})

    def _count(self, prompt_tokens: int = 0) -> None:
        """Count a request. Raises MeasurementError at a limit."""
        limits = self._limits
        with self._lock:
            self._requests += 1
            self._prompt_tokens += prompt_tokens
            over = (
                f"{limits.requests} requests" * (self._requests > limits.requests)
                or f"{limits.prompt_tokens} tokens" * (self._prompt_tokens > limits.prompt_tokens)
                or f"{limits.seconds:.0f} s" * (self._now_s() > self._end_s)
            )
        if over:
            raise MeasurementError(
                f"the calibration would send {self.address} more than {over}",
                hint="Give fewer --contexts and --batch; the samples so far are kept.",
            )

    def _get(self, path: str) -> Any:
        self._count()
        with self._answer("GET", path) as response:
            return self._parsed(response.read())

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[httpx.Response]:
        """A good answer, which is read in the body; the error that any other means."""
        try:
            with self._http.stream(method, path, json=body) as response:
                response.stream = _Bounded(response.stream, self.address)
                if response.status_code != httpx.codes.OK:
                    self._refuse(response, response.read())
                yield response
        except httpx.TimeoutException:
            raise MeasurementError(
                f"{self.address} did not answer for {self._limits.silence_s:.0f} s",
                hint="Is it overloaded? The samples so far are kept.",
            ) from None
        except httpx.ConnectError as error:
            if "SSL" in str(error):
                raise InputError(
                    f"no secure connection to {self.address}: {reason_of(error)}",
                    hint="Is it http:// instead of https://?",
                ) from None
            raise InputError(
                f"nothing listens at {self.address}: {reason_of(error)}",
                hint="Start the server, or correct it.",
            ) from None
        except (httpx.HTTPError, SSEError) as error:
            raise MeasurementError(
                f"the connection to {self.address} failed: {reason_of(error)}",
                hint="Is it an HTTP server, and does it still run?",
            ) from None

    def _refuse(self, response: httpx.Response, content: bytes) -> None:
        """Raise the error that the status means, with the server's own words."""
        status, said = response.status_code, _said(content.decode("utf-8", "replace"))
        if 300 <= status < 400:
            place = shown(response.headers.get("location", ""))
            raise InputError(
                f"{self.address} redirects to {place}, which is not followed",
                hint="Give that address if it is the right one.",
            )
        if status in (401, 403):
            raise InputError(
                f"{self.address} wants an API key, or another one: {said}",
                hint="Put it into the environment variable ROOFTREE_API_KEY.",
            )
        if status in (429, 503):
            wait = response.headers.get("retry-after", "")
            when = f"in {wait} s" if wait.isdecimal() else "when it is idle"
            raise MeasurementError(
                f"{self.address} is too busy ({status}): {said}",
                hint=f"Run again {when}; the samples so far are kept.",
            )
        if status == 404:
            what = f"has no model {self.model!r}, or no completions" if self.model else ""
            what = what or "does not speak the OpenAI API"
            raise InputError(f"{self.address} {what}: {said}", hint=NO_API)
        raise MeasurementError(f"{self.address} answers {status}: {said}")

    def _parsed(self, content: bytes | str) -> Any:
        try:
            return parse_json(content)
        except NotJson:
            raise InputError(
                f"{self.address} does not speak the OpenAI API: its answer is not JSON", hint=NO_API
            ) from None

    def _check_usage(self, usage: Any, prompt_tokens: int, tokens: int) -> None:
        """Raise MeasurementError where the server counts other tokens than it was asked for."""
        if not isinstance(usage, dict):
            raise MeasurementError(
                f"{self.address} does not tell how many tokens it computed (usage)",
                hint="Without that no time can be trusted.",
            )
        told = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
        if told != (prompt_tokens, tokens):
            raise MeasurementError(
                f"{self.address} was sent {prompt_tokens} tokens and asked for {tokens}, "
                f"and counts {shown(told[0])} and {shown(told[1])}",
                hint="It must take token ids as prompts, and ignore_eos.",
            )


class _Bounded(httpx.SyncByteStream):
    """The body of an answer, of so many bytes at most, wherever it is read."""

    def __init__(self, body: Any, address: Address) -> None:
        self._body, self._address = body, address

    def __iter__(self) -> Iterator[bytes]:
        left = MOST_ANSWER_BYTES
        for part in self._body:
            left -= len(part)
            if left < 0:
                raise MeasurementError(f"{self._address} sends an answer without an end")
            yield part

    def close(self) -> None:
        self._body.close()


def _model(entry: dict[str, Any]) -> ServedModel:
    """The entry of a model list; vLLM and SGLang tell `max_model_len`, llama.cpp `meta.n_ctx`."""
    meta = entry.get("meta")
    told = entry.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
    root = entry.get("root")
    return ServedModel(
        name=entry["id"],
        root=root if isinstance(root, str) else "",
        most_tokens=told if _is_count(told) else None,
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _said(text: str) -> str:
    """The message in an error's text, of whatever form; the text itself where there is none."""
    with contextlib.suppress(NotJson):
        found = parse_json(text)
        for name in ("error", "message", "detail"):  # OpenAI's, SGLang's, FastAPI's
            found = found.get(name, found) if isinstance(found, dict) else found
        text = found if isinstance(found, str) else text
    return shown(text[:300])
