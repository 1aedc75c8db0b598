"""A run's page while the run is written: served on this machine alone, and drawn again as samples come.

The server listens on 127.0.0.1 only. Its address holds a random token. There are two routes below it: the page, and
a few numbers that the page asks for every two seconds. Whatever else is asked for (another host, another path, a wrong
token) is refused, so that neither another user of the network nor another page in the same browser reads the run.
"""

from __future__ import annotations

import hmac
import html
import json
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from attemper.errors import InputError
from attemper.report.page import asset, policy
from attemper.report.texts import LANGUAGES, texts
from attemper.store.folder import open_run
from attemper.store.run import Run
from attemper.text import clean

ADDRESS = "127.0.0.1"
LOOK_SECONDS = 1.0
"""Between two looks at the run, at least, however many readers ask."""
TIMEOUT_SECONDS = 10.0
"""After which a reader that sends or takes nothing is let go."""


@dataclass(frozen=True)
class Look:
    """What the page asks for now and again."""

    samples: int
    step: int | None
    """Of the last sample; None before the first."""
    live: bool
    """Whether a process still writes the run."""
    gone: str | None = None
    """Why the run cannot be read any more; None if it can."""


class Source(Protocol):
    """What is served. Both raise InputError or OSError if it cannot be read."""

    def look(self) -> Look: ...
    def page(self) -> str: ...


class RunSource:
    """A stored run, opened anew for each answer: a run that is deleted and made again is the new one."""

    def __init__(self, path: str, page: Callable[[Run], str]) -> None:
        self._path, self._page = path, page

    def look(self) -> Look:
        with self._run() as run:
            steps = run.steps
            return Look(len(steps), int(steps[-1]) if len(steps) else None, run.live)

    def page(self) -> str:
        with self._run() as run:
            return self._page(run)

    @contextmanager
    def _run(self) -> Iterator[Run]:
        """The run. What is wrong with it names its folder as the page does: not by where this machine keeps it."""
        try:
            with open_run(self._path) as run:
                yield run
        except InputError as error:
            raise InputError(str(error).replace(self._path, Path(self._path).name)) from error


class LiveServer(ThreadingHTTPServer):
    """Serves one page until it is closed; ``url`` is its address, with the token.

    Raises:
        InputError: the port is taken or may not be listened on.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    allow_reuse_address = sys.platform != "win32"  # there it would let two servers have one port

    def __init__(self, source: Source, *, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self._source, self._lock = source, Lock()
        self._looked, self._look = -LOOK_SECONDS, Look(0, None, live=True)
        self._drawn: tuple[Look, str] | None = None
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            reason = error.strerror or str(error)
            raise InputError(
                f"port {port} cannot be served on: {reason}. Name another, or 0 for a free one."
            ) from error
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def look(self) -> Look:
        """The run as it was at most ``LOOK_SECONDS`` ago."""
        with self._lock:
            return self._fresh()

    def page(self) -> str:
        """The page of now. Of a run that is gone, the last that was drawn; else a sentence."""
        with self._lock:
            now = self._fresh()
            if now.gone is None and (self._drawn is None or self._drawn[0] != now):
                try:
                    self._drawn = now, self._source.page()
                except (InputError, OSError) as error:
                    if self._drawn is None:
                        return with_script(_message(_reason(error)), now)
            if self._drawn is None:
                return with_script(_message(now.gone or ""), now)
            return with_script(self._drawn[1], now)

    def _fresh(self) -> Look:
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            try:
                self._look = self._source.look()
            except (InputError, OSError) as error:
                before = self._look
                self._look = Look(before.samples, before.step, live=False, gone=_reason(error))
            self._looked = time.monotonic()
        return self._look

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is no error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "attemper", ""
    timeout = TIMEOUT_SECONDS

    @property
    def _served(self) -> LiveServer:
        assert isinstance(self.server, LiveServer)
        return self.server

    def do_GET(self) -> None:
        route = self._route()
        if route == "":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self._served.page())
        elif route == "state":
            self._send(HTTPStatus.OK, "application/json", json.dumps(asdict(self._served.look())))

    do_HEAD = do_GET

    def _route(self) -> str | None:
        """What is asked for below the token; None if it was refused."""
        if self.headers.get_all("Host", []) not in [[host] for host in self._served.hosts]:
            return self._refuse(HTTPStatus.FORBIDDEN)
        first, _, route = self.path.removeprefix("/").partition("/")
        given = hmac.compare_digest(first.encode("utf-8", "replace"), self._served.token.encode())
        if not self.path.startswith("/") or not given or route not in ("", "state") or self.path.count("/") != 2:
            return self._refuse(HTTPStatus.NOT_FOUND)
        return route

    def _refuse(self, status: HTTPStatus) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{status.phrase}\n")

    def _send(self, status: HTTPStatus, kind: str, body: str) -> None:
        data = body.encode("utf-8", "backslashreplace")
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(data))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Content-Security-Policy", "frame-ancestors 'none'"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the address holds the token, and a log would keep it."""


def serve(server: LiveServer) -> None:
    """Serves until Ctrl-C, which is how one leaves it."""
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def with_script(page: str, look: Look) -> str:
    """The page with the script that refreshes it, which its policy then allows, and requests to its own address."""
    script = asset("live.js")
    allowed = re.search(r"script-src ([^;]*)", policy("", (script,)))
    assert allowed is not None
    found = re.search(r'http-equiv="Content-Security-Policy" content="[^"]*script-src ', page)
    assert found is not None, "every page has a policy"
    place = found.end()
    page = f"{page[:place]}{allowed[1]} {page[place:]}"
    page = page.replace("; base-uri ", "; connect-src 'self'; base-uri ", 1)
    head, end, tail = page.rpartition("</body>")
    given = f'data-look="{_attribute(asdict(look))}" data-texts="{_attribute(_texts())}"'
    return f"{head}<script {given}>{script}</script>\n{end}{tail}"


def _texts() -> dict[str, dict[str, Any]]:
    """What the script says, in every language."""
    return {
        language: {key: text for key, text in texts(language).items() if key.startswith("live.")}
        for language in LANGUAGES
    }


def _attribute(value: Any) -> str:
    return html.escape(json.dumps(value, ensure_ascii=False), quote=True)


def _reason(error: Exception) -> str:
    """What is said of a run that cannot be read."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return clean(error)


def _message(reason: str) -> str:
    """A page that says why there is none."""
    style = "body { font: 17px/1.5 system-ui, sans-serif; margin: 15vh auto; max-width: 34em; padding: 0 20px; }"
    rules = html.escape(policy(style, ("",)), quote=True).replace("&#x27;", "'")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{rules}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<title>attemper</title><link rel="icon" href="data:,"><style>{style}</style></head>\n'
        f"<body><main><p>{html.escape(reason)}</p></main>\n</body></html>\n"
    )
