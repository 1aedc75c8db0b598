"""The server of a live page: who is refused, who is served, and what is told when the run is gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from http.client import HTTPConnection
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

import pytest

from attemper.errors import InputError
from attemper.report import live
from attemper.report.live import LiveServer, Look, RunSource
from attemper.store.fragment import Fragment
from tests.support.samples import sample

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Answer = tuple[int, str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with one sample."""
    place = tmp_path / "runs" / "a"
    place.mkdir(parents=True)
    append(place, 1)
    return place


def append(place: Path, step: int) -> None:
    fragment = Fragment(place / "fragment-0.sqlite")
    fragment.append(sample(step))
    fragment.close()


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.0)
    page = import_module("attemper.report.page")
    asset = page.asset
    monkeypatch.setattr(page, "asset", lambda name: asset(name).replace("SECONDS = 2,", "SECONDS = 0.1,"))
    opened = LiveServer(RunSource(str(folder)))
    thread = Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield opened
    opened.shutdown()
    thread.join()
    opened.server_close()


def ask(server: LiveServer, path: str, host: str | None = None, method: str = "GET") -> Answer:
    """Status and body, for a path that is sent as it stands."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def state(server: LiveServer) -> dict[str, object]:
    status, body = ask(server, f"/{server.token}/state")
    assert status == 200
    return json.loads(body)


def test_the_state_is_served_while_a_page_is_drawn(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = Event(), Event()

    def draw(look: Look) -> str:
        begun.set()
        assert end.wait(20)
        return "drawn"

    monkeypatch.setattr(server._source, "page", draw)
    with ThreadPoolExecutor() as readers:
        page = readers.submit(ask, server, f"/{server.token}/")
        assert begun.wait(20)
        try:
            assert state(server)["samples"] == 1
            assert not page.done()
        finally:
            end.set()
        assert page.result() == (200, "drawn")


def test_the_page_and_its_state_are_served_under_the_token(server: LiveServer, folder: Path) -> None:
    status, body = ask(server, f"/{server.token}/")
    assert status == 200
    assert body.startswith("<!doctype html>")
    assert "connect-src 'self'" in unescape(body)
    assert server.url == f"http://127.0.0.1:{server.server_port}/{server.token}/"
    assert state(server) == {"samples": 1, "step": 1, "live": False, "gone": None}
    append(folder, 5)
    assert state(server) == {"samples": 2, "step": 5, "live": False, "gone": None}


def test_it_listens_on_this_machine_alone(server: LiveServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(InputError, match=r"cannot be served on: .*Name another, or 0 for a free one"):
        LiveServer(RunSource("a"), port=server.server_port)


def test_another_host_header_is_refused(server: LiveServer) -> None:
    hosts = ("", "evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "[::1]:{port}")
    for host in hosts:
        found = ask(server, f"/{server.token}/", host.format(port=server.server_port))
        assert found == (403, "Forbidden\n"), host
    assert ask(server, f"/{server.token}/", f"localhost:{server.server_port}")[0] == 200


PATHS = (
    "/", "/state", "//", "/{wrong}/", "/{token}", "/{token}x/", "/{token}/state/", "/{token}/other", "/{token}//",
    "/{token}/../", "/{token}/..%2f..%2fetc%2fpasswd", "/{token}/../../../../etc/passwd", "/{token}/a.sqlite",
    "/{token}/?a=1", "/{token}/state?a=1", "/%00", "/é/", "http://127.0.0.1/{token}/", "*",
)  # fmt: skip


def test_a_missing_or_wrong_token_and_every_other_path_are_refused(server: LiveServer) -> None:
    for path in PATHS:
        asked = path.format(token=server.token, wrong="x" * len(server.token)).encode()
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as raw:
            raw.sendall(b"GET " + asked + b" HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % server.server_port)
            answer = raw.makefile("rb").read()
        assert answer.split(b" ")[1] in (b"404", b"400"), (path, answer[:200])
        assert b"doctype" not in answer.lower(), path
        assert server.token.encode() not in answer, path


def test_nothing_can_be_sent_to_it(server: LiveServer) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, f"/{server.token}/", method=method)[0] == 501, method


def test_ten_readers_at_once_get_the_same_page(server: LiveServer, folder: Path) -> None:
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: ask(server, f"/{server.token}/"), range(30)))
    assert {status for status, _ in answers} == {200}
    assert len({body for _, body in answers}) == 1


def test_a_reader_that_stalls_or_leaves_holds_nobody_up(server: LiveServer, capfd: pytest.CaptureFixture[str]) -> None:
    stalled = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(10)]
    stalled[0].sendall(f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
    stalled[0].close()
    assert ask(server, f"/{server.token}/")[0] == 200
    for one in stalled:
        one.close()
    assert "Traceback" not in capfd.readouterr().err


def test_a_run_that_is_deleted_is_told_and_its_last_page_stays(server: LiveServer, folder: Path) -> None:
    _, before = ask(server, f"/{server.token}/")
    shutil.rmtree(folder)
    found = state(server)
    assert found["samples"] == 1
    assert found["live"] is False
    assert "a" in str(found["gone"])
    assert str(folder.parent) not in str(found["gone"]), "no page shows a path unasked"
    status, after = ask(server, f"/{server.token}/")
    assert status == 200
    assert before == after
    folder.mkdir()
    append(folder, 9)
    assert state(server) == {"samples": 1, "step": 9, "live": False, "gone": None}, "one that comes back is shown again"


def test_what_cannot_be_drawn_yet_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty(RunSource):
        def look(self) -> Look:
            return Look(0, None, live=True)

        def page(self, look: Look) -> str:
            raise InputError("the run <b>a</b> has no sample yet.")

    server = LiveServer(Empty("a"))
    shown = server.page()
    server.server_close()
    assert "<p>the run &lt;b&gt;a&lt;/b&gt; has no sample yet.</p>" in shown
    assert '"samples": 0' in shown


@pytest.mark.slow("a process of its own")
def test_ctrl_c_stops_it_and_nothing_opens(folder: Path) -> None:
    command = [sys.executable, "-m", "attemper", "report", str(folder), "--live", "--json"]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"BROWSER": "false"}
    )
    assert started.stdout is not None
    url = json.loads(started.stdout.readline())["url"]
    port = int(url.split(":")[2].split("/")[0])
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/" + url.split("/", 3)[3])
    assert connection.getresponse().status == 200
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=20)
    assert started.returncode == 0, err
    assert (out, err) == ("", "stopped\n")
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


@pytest.mark.slow("a browser for seconds")
def test_the_page_tells_of_new_samples_and_of_a_run_that_is_gone(
    server: LiveServer, folder: Path, browser: Browser
) -> None:
    troubles: list[str] = []
    requests: list[str] = []
    context = browser.new_context(locale="en")
    tab = context.new_page()
    tab.on("console", lambda message: troubles.append(message.text))
    tab.on("pageerror", lambda error: troubles.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(server.url)
    bar = tab.locator("#live-bar")
    assert bar.text_content() == "The run has ended at step 1"
    first = tab.text_content("#panel-title")
    append(folder, 1500)
    bar.get_by_text("New samples up to step 1,500").wait_for()
    tab.click("#theme")
    theme = tab.get_attribute("html", "data-theme")
    tab.locator("button.place[data-head='2']").last.click()
    chosen = tab.text_content("#panel-title")
    assert chosen != first, "another head than the one it opens with"
    bar.locator("button").click()
    bar.get_by_text("The run has ended at step 1,500").wait_for()
    assert tab.get_attribute("html", "data-theme") == theme, "what the reader set goes over to the new page"
    assert tab.text_content("#panel-title") == chosen
    shutil.rmtree(folder)
    bar.get_by_text("The run cannot be read any more").wait_for()
    assert tab.locator("main").is_visible(), "the last page stays"
    context.close()
    assert troubles == []
    assert set(requests) == {server.url, f"{server.url}state"}


def test_an_error_of_any_kind_is_answered_and_prints_no_traceback(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Look:
        raise KeyError("something nobody thought of")

    monkeypatch.setattr(server._source, "look", broken)
    for route in ("", "state"):
        assert ask(server, f"/{server.token}/{route}") == (500, "Internal Server Error\n")
    assert capfd.readouterr() == ("", "")
