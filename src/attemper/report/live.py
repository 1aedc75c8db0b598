"""A run's page while the run is written: served on this machine alone, and drawn again as samples come.

The server listens on 127.0.0.1 only. Its address holds a random token. There are two routes below it: the page, and
a few numbers that the page asks for every two seconds. Whatever else is asked for (another host, another path, a wrong
token) is refused, so that neither another user of the network nor another page in the same browser reads the run.
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from attemper.errors import InputError
from attemper.report.page import message_page
from attemper.report.run_page import run_page
from attemper.store.folder import open_stored
from attemper.store.run import StoredRun
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


class RunSource:
    """A stored run, opened anew for each answer: a run that is deleted and made again is the new one. InputError or
    OSError: it cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def look(self) -> Look:
        with self._run() as run:
            steps = run.steps
            return Look(len(steps), int(steps[-1]) if len(steps) else None, run.live)

    def page(self, look: Look) -> str:
        """The page with the script that refreshes it, and in it how the run looked when it was drawn."""
        with self._run() as run:
            return run_page(run, look=asdict(look))

    @contextmanager
    def _run(self) -> Iterator[StoredRun]:
        """The run. What is wrong with it names its folder as the page does: not by where this machine keeps it."""
        try:
            with open_stored(self._path, StoredRun) as run:
                yield run
        except InputError as error:
            raise InputError(str(error).replace(self._path, Path(self._path).name)) from error


class LiveServer(ThreadingHTTPServer):
    """Serves one page until it is closed; ``url`` is its address, with the token. ``InputError``: the port is taken or
    may not be listened on.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    allow_reuse_address = sys.platform != "win32"  # there it would let two servers have one port

    def __init__(self, source: RunSource, *, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self._source, self._lock, self._drawing = source, Lock(), Lock()
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
        """The page of now; of a run that is gone, the last that was drawn; else a sentence."""
        with self._drawing:  # one at a time, while ``look`` goes on answering
            now = self.look()
            if now.gone is None and (self._drawn is None or self._drawn[0] != now):
                try:
                    self._drawn = now, self._source.page(now)
                except (InputError, OSError) as error:
                    if self._drawn is None:
                        return message_page(_reason(error), asdict(now))
            if self._drawn is None:
                return message_page(now.gone or "", asdict(now))
            return self._drawn[1]

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
        try:
            if route == "":
                kind, body = "text/html; charset=utf-8", self._served.page()
            elif route == "state":
                kind, body = "application/json", json.dumps(asdict(self._served.look()))
            else:
                return
        except Exception:  # whatever a damaged file made go wrong: the reader gets an answer, the terminal no traceback
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR)
        else:
            self._send(HTTPStatus.OK, kind, body)

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


def _reason(error: Exception) -> str:
    """What is said of a run that cannot be read."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return clean(error)
