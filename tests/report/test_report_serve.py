"""The server of `apportion watch` over real sockets: who is answered, what there is, and that nothing stops it.

Planted faults seen caught: no host check, a host compared by its beginning or without its port, the first of two
hosts, no origin check, an origin of another of our names, `same-site` let through, the first of two Sec-Fetch-Site,
any method, HEAD with a body, a body read as the next request, a target decoded, its query dropped, its dots or
slashes folded, a key not anchored or of any length, a request line or broken headers let through, a 304 without its
tag or for any tag, tags compared as strings, gzip always or where its weight is 0, the text of an error sent or no
answer to one, a banner, a header left out, all addresses, no limit on a head's size, on its time, on idling, on
sending, on connections, places never given back, links out followed (a step's file, a kind's folder, a file of the
run, a dangling one, a comparison), a folder compared as text or unresolved, a pipe opened, a step listed before its
rollouts, a half-written line read, a wrong line or a whole last one skipped, an index kept for ever or never, by
sizes alone or without some of the files.
"""

from __future__ import annotations

import gzip
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import write_run

from apportion.errors import InputError
from apportion.records import RunFolder
from apportion.report import serve
from apportion.report.serve import Guarded, OwnFiles, Server, inside, listen

SHELL = "<!DOCTYPE html><title>shell</title>"
SECRET = "kept-outside"


class Pages:
    """Steps 1 and 2, rows 0 to 2 of each; what a test puts into `extra` goes into the index."""

    def __init__(self) -> None:
        self.extra: dict[str, Any] = {}
        self.asked: list[str] = []

    def index(self) -> dict[str, Any]:
        return {"schema": 2, "steps": [1, 2], **self.extra}

    def chunk(self, key: str) -> dict[str, Any]:
        self.asked.append(key)
        if key == "step-9":
            raise RuntimeError(f"a fault of ours: {SECRET}")
        known = {f"step-{step}{row}" for step in (1, 2) for row in ("", "-row-0", "-row-1", "-row-2")}
        if key not in known:
            raise InputError("key", key, "another")
        return {"key": key, "text": "</script><b>&" * 40}


@contextmanager
def running(pages: Any, **given: Any) -> Iterator[Server]:
    with Server(pages, SHELL, **given) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def server(pages: Pages) -> Iterator[Server]:
    with running(pages) as found:
        yield found


@pytest.fixture(scope="module")
def standing() -> Iterator[Server]:
    """One server for all the targets of a fuzz."""
    with running(Pages()) as found:
        yield found


class Answer:
    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(first.split()[1])
        self.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        self.raw = raw


def exchange(server: Server, data: bytes, seconds: float = 10) -> bytes:
    """All that comes back on one connection until the server ends it."""
    with socket.create_connection(("127.0.0.1", server.port), seconds) as connection:
        connection.settimeout(seconds)
        with suppress(OSError):  # refused before all was sent
            connection.sendall(data)
        parts = []
        with suppress(ConnectionResetError):  # what was sent and not read ends in a reset, after the answer
            while part := connection.recv(65536):
                parts.append(part)
    return b"".join(parts)


def ask(server: Server, target: str = "/", method: str = "GET", host: str | None = None, **headers: str) -> Answer:
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host or f'127.0.0.1:{server.port}'}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return Answer(exchange(server, "\r\n".join([*lines, "", ""]).encode("latin-1")))


def is_alive(server: Server) -> None:
    assert json.loads(ask(server, "/index.json").body)["steps"] == [1, 2]


# --- what there is ------------------------------------------------------------------------------------------------


def test_the_three_routes(server: Server) -> None:
    assert ask(server).body.decode() == SHELL and ask(server).headers["content-type"] == "text/html; charset=utf-8"
    index = ask(server, "/index.json")
    assert index.headers["content-type"] == "application/json"
    assert json.loads(index.body) == {"schema": 2, "steps": [1, 2]}
    chunk = ask(server, "/chunk/step-2-row-1")
    assert json.loads(chunk.body)["key"] == "step-2-row-1"
    assert b"<" not in chunk.body and b"&" not in chunk.body


@pytest.mark.parametrize("target", ["/", "/index.json", "/chunk/step-1", "/nothing"])
def test_every_answer_carries_the_headers(server: Server, target: str) -> None:
    headers = ask(server, target).headers
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-cache" and headers["x-frame-options"] == "DENY"
    assert headers["content-security-policy"] == "frame-ancestors 'none'"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "server" not in headers and not any(name.startswith("access-control") for name in headers)


@pytest.mark.parametrize("target", ["/", "/index.json", "/chunk/step-1", "/nothing"])
def test_head_is_get_without_its_body(server: Server, target: str) -> None:
    get, head = ask(server, target), ask(server, target, "HEAD")
    assert head.body == b"" and get.body != b""
    assert (head.status, head.headers) == (get.status, get.headers)
    assert int(head.headers["content-length"]) == len(get.body)


@pytest.mark.parametrize(
    "method",
    ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "Get", "X", "__init__"],
)
def test_other_methods_are_refused(server: Server, pages: Pages, method: str) -> None:
    answer = ask(server, "/chunk/step-1", method)
    assert answer.status == 405 and answer.headers["allow"] == "GET, HEAD"
    assert pages.asked == []


def test_a_body_is_not_read_as_the_next_request(server: Server, pages: Pages) -> None:
    inner = f"GET /chunk/step-1 HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n"
    for head in (f"Content-Length: {len(inner)}", "Transfer-Encoding: chunked", "Content-Length: 0, 5"):
        for method in ("POST", "GET"):
            raw = f"{method} / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n{head}\r\n\r\n{inner}"
            assert exchange(server, raw.encode()).count(b"HTTP/1.1 ") == 1
    assert pages.asked == []


def test_a_large_body_is_cut_off(server: Server, pages: Pages) -> None:
    head = f"POST /chunk/step-1 HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 400000\r\n\r\n"
    assert Answer(exchange(server, head.encode() + b"x" * 400_000)).status == 405
    is_alive(server)
    assert pages.asked == []


# --- who is answered ----------------------------------------------------------------------------------------------

HOSTS = [
    "evil.example", "evil.example:{port}", "127.0.0.1", "localhost", "127.0.0.1:1", "127.0.0.1:{port}.evil.example",
    "127.0.0.1:{port}0", "localhost:{port}@evil.example", "evil.example@localhost:{port}",
    "localhost.evil.example:{port}",
    "127.0.0.1.nip.io:{port}", "127.1:{port}", "127.0.0.2:{port}", "2130706433:{port}", "0x7f.0.0.1:{port}",
    "0.0.0.0:{port}", "[::]:{port}", "[::ffff:127.0.0.1]:{port}", "::1:{port}", "LOCALHOST:{port}", "localhost.:{port}",
    "localhost:{port}/", "http://localhost:{port}", "127.0.0.1:{port},evil.example", "127.0.0.1:{port} evil.example",
    "127.0.0.1:+{port}", "127.0.0.1:0{port}", "*",
]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_another_host_is_refused(server: Server, pages: Pages, host: str) -> None:
    for target in ("/", "/index.json", "/chunk/step-1", "/nothing"):
        answer = ask(server, target, host=host.format(port=server.port))
        assert answer.status == 421 and SHELL.encode() not in answer.body and len(answer.body) < 200
    assert pages.asked == []


def test_our_own_hosts_are_answered_and_no_host_or_two_are_not(server: Server) -> None:
    for name in ("127.0.0.1", "localhost", "[::1]"):
        assert ask(server, "/index.json", host=f"{name}:{server.port}").status == 200
    ours, other = f"Host: 127.0.0.1:{server.port}\r\n", "Host: evil.example\r\n"
    for hosts in ("", "Host:\r\n", ours + other, other + ours, ours + ours):
        for version in ("1.0", "1.1"):
            raw = f"GET /index.json HTTP/{version}\r\n{hosts}Connection: close\r\n\r\n"
            assert Answer(exchange(server, raw.encode())).status == 421


def test_the_port_can_be_left_out_where_it_is_80(server: Server) -> None:
    assert not {"localhost", "127.0.0.1"} & server.hosts
    try:
        web = Server(Pages(), SHELL, 80)
    except OSError as error:
        pytest.skip(f"port 80 cannot be listened on here: {error}")
    with web:
        assert {"localhost", "localhost:80", "[::1]"} <= web.hosts


def test_pages_of_other_origins_are_refused(server: Server, pages: Pages) -> None:
    port = server.port
    strange = [
        "null", "http://evil.example", f"https://127.0.0.1:{port}", "http://127.0.0.1", "http://127.0.0.1:1",
        f"http://localhost:{port}", f"http://127.0.0.1:{port}.evil.example", f"http://127.0.0.1:{port}/", "",
        f"http://127.0.0.1:{port} http://evil.example", "file://",
    ]  # fmt: skip
    for origin in strange:
        assert ask(server, "/chunk/step-1", Origin=origin).status == 403, origin
    for site in ("cross-site", "same-site", "Same-Origin", "", "none, cross-site"):
        assert ask(server, "/chunk/step-1", Sec_Fetch_Site=site).status == 403, site
    assert pages.asked == []
    raw = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nSec-Fetch-Site: none\r\nSec-Fetch-Site: cross-site\r\n\r\n"
    assert Answer(exchange(server, raw.encode())).status == 403
    ours = ask(server, "/chunk/step-1", Origin=f"http://127.0.0.1:{port}", Sec_Fetch_Site="same-origin")
    assert ours.status == 200 and ask(server, Sec_Fetch_Site="none").status == 200


# --- targets ------------------------------------------------------------------------------------------------------

TARGETS = [
    "//", "//index.json", "/index.json/", "/./index.json", "/a/../index.json", "/../index.json", "/..", "/.",
    "/%2e%2e/", "/index%2ejson", "/index.json%00", "/index.json?", "/index.json?x=1", "/?", "/#",
    "/index.json#a", "/INDEX.JSON",
    "/index", "/metrics.jsonl", "/config.toml", "/credit/step-000001.parquet", "/rollouts/step-000001.parquet",
    "/../../etc/passwd", "/etc/passwd", "/chunk", "/chunk/", "/chunk//step-1", "/chunk/../index.json", "/chunk/step-",
    "/chunk/step-1/", "/chunk/step-1-row-", "/chunk/step-1-row-1-row-1", "/chunk/step--1", "/chunk/step-+1",
    "/chunk/step-1.0", "/chunk/step-1%0a", "/chunk/step-%31", "/chunk/step-1/../../credit", "/chunk/step-1\\..\\x",
    "/chunk/step-1234567890", "/chunk/step-1-row-1234567890", "/chunk/step-1e1", "/chunk/Step-1", "/chunk/xstep-1",
    "/chunk/step-1x", "/chunk/..%2fstep-1", "/chunk/%2e%2e%2fconfig.toml", "/chunk/step-1;x", "/chunk/rollouts-1",
    "/chunk/file:///etc/passwd", "\\index.json", "index.json", "*", "..", "http://evil.example/",
    "http://127.0.0.1/index.json", "file:///etc/passwd", "evil.example:443", "/" + "a" * 30_000, "/" + "../" * 5_000,
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[:40])
def test_there_is_nothing_else(server: Server, pages: Pages, target: str) -> None:
    answer = ask(server, target)
    assert (answer.status, answer.body) == (404, b"404 Not Found\n")
    assert pages.asked == []


def test_the_absolute_form_of_our_own_address_is_nothing_either(server: Server) -> None:
    assert ask(server, server.url + "index.json").status == 404


@pytest.mark.parametrize(
    "line",
    [
        b"", b" ", b"\0", b"GET", b"GET /", b"GET / HTTP/0.9", b"GET / HTTP/2.0", b"GET / HTTP/1.1 x",
        b"GET / / HTTP/1.1", b"GET /index.json\0 HTTP/1.1", b"GET /index.json\x85 HTTP/1.1",
        b"GET /index.json\xa0 HTTP/1.1",
        b"GET\t/index.json\tHTTP/1.1", b"GET /\xff\xfe HTTP/1.1", "GET /chunk/step-\u0661 HTTP/1.1".encode(),
        b"GET / HTTP/1.1\rHost: x", b"GET / http/1.1", b"GET / HTTP/11", b"GET / HTTP/1.", b" GET / HTTP/1.1",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0", b"GET  / HTTP/1.1", b"HTTP/1.1 200 OK",
    ],
)  # fmt: skip
def test_lines_that_are_no_request(server: Server, line: bytes) -> None:
    raw = exchange(server, line + f"\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
    assert Answer(raw).status == 400 and raw.count(b"HTTP/1.1 ") == 1
    assert Answer(raw).body == b"400 Bad Request\n"
    is_alive(server)


@pytest.mark.parametrize("header", [b"Host : x", b"\0: x", b"no colon", b": empty", b" folded first"])
def test_headers_that_are_none(server: Server, header: bytes) -> None:
    raw = b"GET /index.json HTTP/1.1\r\n%b\r\nHost: 127.0.0.1:%d\r\n\r\n" % (header, server.port)
    assert Answer(exchange(server, raw)).status in (400, 421)
    is_alive(server)


PIECES = [
    "/", ".", "..", "%2e", "%00", "chunk", "step", "-1", "row", "index.json", "\\", "?", "#", "http:", "\u0661", "\x7f",
    ";",
]  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=8).map("".join)))
def test_any_target_is_a_page_or_nothing(standing: Server, target: str) -> None:
    """Written apart from the pattern: only these names are more than a 400 or a 404."""
    head = f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{standing.port}\r\nConnection: close\r\n\r\n"
    answer = Answer(exchange(standing, head.encode("utf-8", "surrogatepass")))
    known = {"/", "/index.json", "/chunk/step-1", "/chunk/step-2", "/chunk/step-1-row-1", "/chunk/step-2-row-1"}
    assert answer.status in ([200] if target in known else [400, 404])


# --- tags and compression -----------------------------------------------------------------------------------------


def test_an_unchanged_answer_is_304_until_it_changes(server: Server, pages: Pages) -> None:
    tag = ask(server, "/index.json").headers["etag"]
    strong = tag.removeprefix("W/")
    for condition in (tag, strong, f'"other", {tag}', f'{strong},W/"x"', "*"):
        for method in ("GET", "HEAD"):
            same = ask(server, "/index.json", method, If_None_Match=condition)
            assert (same.status, same.body, same.headers["etag"]) == (304, b"", tag)
            assert "content-length" not in same.headers
    for condition in ("", '"other"', tag[:-2] + '"', tag.strip('W/"')):
        assert ask(server, "/index.json", If_None_Match=condition).status == 200
    pages.extra["steps"] = [1, 2, 3]
    grown = ask(server, "/index.json", If_None_Match=tag)
    assert grown.status == 200 and grown.headers["etag"] != tag and json.loads(grown.body)["steps"] == [1, 2, 3]


def test_gzip_is_sent_to_those_who_take_it(server: Server) -> None:
    plain = ask(server, "/chunk/step-1")
    assert "content-encoding" not in plain.headers and plain.headers["vary"] == "Accept-Encoding"
    for accepted in ("gzip", "deflate, gzip, br", "br;q=1, GZIP;q=0.5", "gzip;q=0.001"):
        packed = ask(server, "/chunk/step-1", Accept_Encoding=accepted)
        assert packed.headers["content-encoding"] == "gzip" and gzip.decompress(packed.body) == plain.body
        assert int(packed.headers["content-length"]) == len(packed.body) < len(plain.body)
        assert packed.headers["etag"] == plain.headers["etag"]
    for accepted in ("", "br", "gzip;q=0", "gzip; Q=0.000", "xgzip", "identity"):
        assert "content-encoding" not in ask(server, "/chunk/step-1", Accept_Encoding=accepted).headers
    head = ask(server, "/chunk/step-1", "HEAD", Accept_Encoding="gzip")
    assert head.body == b"" and head.headers["content-encoding"] == "gzip"


# --- nothing stops it ---------------------------------------------------------------------------------------------


def test_a_fault_of_ours_is_told_in_the_terminal_alone(pages: Pages) -> None:
    told: list[str] = []
    with running(pages, told=told.append) as server:
        answer = ask(server, "/chunk/step-9")
        assert (answer.status, answer.body) == (500, b"500 Internal Server Error\n")
        assert SECRET.encode() not in answer.raw and b"Traceback" not in answer.raw
        assert told == [f"RuntimeError in GET /chunk/step-9 HTTP/1.1: a fault of ours: {SECRET}"]
        pages.extra["not JSON"] = float("nan")
        assert ask(server, "/index.json").status == 500
        pages.extra.clear()
        is_alive(server)


def test_one_connection_carries_many_requests(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    used = set()
    for target in ["/", "/index.json", "/chunk/step-1", "/nothing"] * 3:
        connection.request("GET", target)
        answer = connection.getresponse()
        used.add(connection.sock.getsockname())
        answer.read()
    connection.close()
    assert len(used) == 1
    line = f"GET /index.json HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
    raw = exchange(server, (f"{line}\r\n" * 4 + f"{line}Connection: close\r\n\r\n").encode())
    assert raw.count(b"HTTP/1.1 200 OK") == 5
    assert exchange(server, line.replace("1.1\r", "1.0\r").encode() + b"\r\n").count(b"HTTP/1.1 200") == 1


def test_many_at_once(server: Server) -> None:
    def one(i: int) -> tuple[int, Any]:
        answer = ask(server, f"/chunk/step-{1 + i % 2}-row-{i % 3}", Accept_Encoding="gzip")
        return i, json.loads(gzip.decompress(answer.body))["key"]

    with ThreadPoolExecutor(24) as pool:
        for i, key in pool.map(one, range(300)):
            assert key == f"step-{1 + i % 2}-row-{i % 3}"


@pytest.mark.parametrize(
    "rest",
    [b"X: " + b"a" * 200_000, b"X: a\r\n" * 50_000, b"X: " + b"a" * 70_000 + b"\r\n", b"a: b\r\n" * 101],
    ids=["one endless line", "endless lines", "a long line", "101 lines"],
)
def test_a_head_without_end_is_cut_off(server: Server, rest: bytes) -> None:
    begin = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n".encode()
    assert Answer(exchange(server, begin + rest + b"\r\n\r\n")).status == 431
    assert Answer(exchange(server, b"GET /" + b"a" * 100_000)).status == 431
    is_alive(server)


def test_those_who_wait_or_drip_are_let_go(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("IDLE", 0.2), ("HEAD", 0.4)):
        monkeypatch.setattr(serve, name, seconds)
    began = time.monotonic()
    assert exchange(server, b"") == b"" and exchange(server, b"GET / HT") == b""
    assert time.monotonic() - began < 3
    with socket.create_connection(("127.0.0.1", server.port), 10) as dripping:
        # Each byte comes in time, the whole does not.
        with pytest.raises(OSError):
            for _ in range(100):
                dripping.sendall(b"G")
                time.sleep(0.05)
                dripping.settimeout(0.01)
                try:
                    if dripping.recv(1) == b"":
                        raise OSError("let go")
                except TimeoutError:
                    pass
        assert time.monotonic() - began < 5
    is_alive(server)


def test_a_client_that_reads_nothing_is_let_go(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "SEND", 0.2)
    pages.extra["large"] = "x" * 20_000_000
    with running(pages) as server, socket.create_connection(("127.0.0.1", server.port), 10) as stuck:
        stuck.sendall(f"GET /index.json HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
        wait_until(lambda: server._free._value == serve.CONNECTIONS, 10)
        assert ask(server).status == 200


def test_connections_beyond_the_limit_are_turned_away_and_the_others_served(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "CONNECTIONS", 4)
    with running(pages) as server:
        for _ in range(3):  # the places come back
            held = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(4)]
            wait_until(lambda: server._free._value == 0)
            with socket.create_connection(("127.0.0.1", server.port), 10) as more:
                assert more.recv(100).startswith(b"HTTP/1.1 503 ")
            request = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n\r\n".encode()
            for connection in held:
                connection.sendall(request)
                assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
                connection.close()
            wait_until(lambda: server._free._value == 4)


def test_clients_that_vanish(server: Server) -> None:
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.sendall(f"GET /chunk/step-1 HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
    is_alive(server)


def test_it_listens_on_loopback_alone_and_a_taken_port_is_bad_input(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1" and server.url == f"http://127.0.0.1:{server.port}/"
    with pytest.raises(InputError, match=rf"--port: got {server.port}: .*; expected a port that is free, or 0 for any"):
        listen(Pages(), SHELL, server.port, print)
    with listen(Pages(), SHELL, None, print) as first, listen(Pages(), SHELL, None, print) as second:
        assert first.port != second.port
        # The first free from 8765 on; others on this machine may hold some.
        assert serve.PORT <= first.port < second.port < serve.PORT + serve.NEXT


def wait_until(condition: Callable[[], Any], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


# --- the run's files ----------------------------------------------------------------------------------------------


class Recorded:
    """What a site reads: all of a run's records."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def index(self) -> dict[str, Any]:
        return {"steps": self.folder.steps(), "metrics": [row["step"] for row in self.folder.metrics()]}

    def chunk(self, key: str) -> dict[str, Any]:
        step = int(key.split("-")[1])
        if step not in self.folder.steps():
            raise InputError("key", key, "another")
        return {
            kind: [row["row"] for row in self.folder.read(kind, step)] for kind in ("rollouts", "evidence", "credit")
        }


@pytest.fixture
def growing(tmp_path: Path) -> RunFolder:
    return write_run(tmp_path / "runs" / "run", steps=2, prompts=1, group=2, logged=2)


def indexed(folder: RunFolder) -> dict[str, Any]:
    with running(Recorded(OwnFiles(folder.path))) as server:
        answer = ask(server, "/index.json")
        assert answer.status == 200
        return json.loads(answer.body)


def test_inside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "credit").mkdir(parents=True)
    (tmp_path / "run-2").mkdir()
    (tmp_path / "out").write_text(SECRET)
    links = {"a": "credit", "b": "../out", "c": "d", "d": "c", "e": str(folder / "credit"), "f": "../run-2", "g": "b"}
    for name, to in links.items():
        (folder / name).symlink_to(to)
    (tmp_path / "latest").symlink_to(folder)
    expected = {
        "": True, "credit": True, "credit/none": True, "a": True, "a/x": True, "e": True, "b": False, "c": False,
        "f": False, "f/x": False, "g": False, "..": False, "../run-2": False, "credit/..": True, "credit/../..": False,
        "/etc/passwd": False,
    }  # fmt: skip
    assert {name: inside(folder, folder / name) for name in expected} == expected
    assert inside(tmp_path / "latest", tmp_path / "latest" / "credit") and inside(folder, tmp_path / "latest" / "a")


@pytest.mark.parametrize("kind", ["credit", "rollouts", "evidence"])
def test_links_out_of_the_folder_are_not_followed(growing: RunFolder, tmp_path: Path, kind: str) -> None:
    own = growing.path
    with running(Recorded(OwnFiles(own))) as server:
        assert json.loads(ask(server, "/index.json").body) == {"steps": [10, 20], "metrics": [10, 20]}
        # One of the steps, and then all of the kind.
        for path, kept in ((Path(kind) / "step-000020.parquet", [10]), (Path(kind), [])):
            target = tmp_path / "outside" / path.name
            target.parent.mkdir(exist_ok=True)
            (own / path).rename(target)
            (own / path).symlink_to(target)
            assert OwnFiles(own).links_out() == [str(path)]
            assert OwnFiles(own).read(kind, 20) == []
            index, chunk = json.loads(ask(server, "/index.json").body), ask(server, "/chunk/step-20")
            if kind == "evidence":
                assert index["steps"] == [10, 20] and json.loads(chunk.body)["evidence"] == []
            else:
                assert index["steps"] == kept and chunk.status == 404
            (own / path).unlink()
            target.rename(own / path)
        assert OwnFiles(own).links_out() == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl", "config.toml", "result.json"])
def test_a_file_of_the_run_that_lies_elsewhere_is_refused(growing: RunFolder, tmp_path: Path, name: str) -> None:
    told: list[str] = []
    file = growing.path / name
    with running(Recorded(OwnFiles(growing.path)), told=told.append) as server:
        for wrong in ("outside", "nothing", "pipe"):
            file.unlink(missing_ok=True)
            (tmp_path / "outside").write_text(f'{{"step": 1, "{SECRET}": 1}}\n')
            os.mkfifo(file) if wrong == "pipe" else file.symlink_to(tmp_path / wrong)
            answer = ask(server, "/index.json")
            assert answer.status == 500 and SECRET.encode() not in answer.raw
            assert f"{name}: got a link out of the folder, or no plain file" in told.pop()
        file.unlink()
        (growing.path / "kept").write_text('{"step": 1}\n')
        file.symlink_to("kept")
        assert ask(server, "/index.json").status == 200


@pytest.mark.parametrize("name", ["", "shown.json", "grpo", "grpo/about.json", "grpo/credit/step-000010.parquet"])
def test_a_comparison_that_lies_elsewhere_is_refused(growing: RunFolder, tmp_path: Path, name: str) -> None:
    own, outside = growing.path, tmp_path / "outside"
    (own / "compare" / "grpo" / "credit").mkdir(parents=True)
    for file in ("shown.json", "grpo/about.json", "grpo/credit/step-000010.parquet"):
        (own / "compare" / file).write_text(SECRET)
    told: list[str] = []
    with running(Guarded(Recorded(OwnFiles(own)), OwnFiles(own)), told=told.append) as server:
        assert ask(server, "/index.json").status == 200 == ask(server, "/chunk/step-10").status
        (own / "compare" / name).rename(outside)
        (own / "compare" / name).symlink_to(outside)
        assert ask(server, "/index.json").status == 500 and "a link out of the folder, or no plain file" in told[0]
        assert ask(server, "/chunk/compare-10").status == 404 == ask(server, "/chunk/step-10").status


def test_links_inside_the_folder_and_to_it_are_followed(growing: RunFolder, tmp_path: Path) -> None:
    (growing.path / "credit").rename(growing.path / "kept")
    (growing.path / "credit").symlink_to("kept")
    (tmp_path / "latest").symlink_to(growing.path)
    assert indexed(RunFolder(tmp_path / "latest"))["steps"] == [10, 20]
    assert OwnFiles(tmp_path / "latest").read("credit", 20) == growing.read("credit", 20) != []


def test_a_step_that_is_no_plain_file_is_not_opened(growing: RunFolder) -> None:
    for kind, make in (("credit", os.mkfifo), ("rollouts", os.mkdir)):
        file = growing.path / kind / "step-000020.parquet"
        file.unlink()
        make(file)
        assert indexed(growing)["steps"] == [10]
        assert OwnFiles(growing.path).read(kind, 20) == []


def test_a_run_grows_while_it_is_served(tmp_path: Path, growing: RunFolder) -> None:
    """From no folder at all, file by file in the order in which training writes them."""
    late = RunFolder(tmp_path / "late")
    with running(Recorded(OwnFiles(late.path))) as server:

        def now() -> dict[str, Any]:
            return json.loads(ask(server, "/index.json").body)

        assert now() == {"steps": [], "metrics": []}
        late.path.mkdir()
        assert now() == {"steps": [], "metrics": []} and ask(server, "/chunk/step-10").status == 404
        for step in (10, 20):
            done = now()
            late.write("credit", step, growing.read("credit", step))
            assert now() == done  # without its rollouts it is no step yet
            for kind in ("rollouts", "evidence"):
                late.write(kind, step, growing.read(kind, step))
            assert now()["steps"] == [*done["steps"], step]
            assert json.loads(ask(server, f"/chunk/step-{step}").body)["rollouts"] == [0, 1]
            (late.path / "credit" / "step-000099.part").write_bytes(b"half")
            late.log({"step": step, "reward": 0.5})
            assert now()["metrics"] == [*done["steps"], step]


def test_the_index_is_made_again_only_once_the_run_has_changed(tmp_path: Path, growing: RunFolder) -> None:
    late = RunFolder(tmp_path / "late")
    pages, made = Pages(), 0
    kept = Guarded(pages, OwnFiles(late.path))

    def changed() -> bool:
        """Whether the index was made anew, once and not again."""
        nonlocal made
        made += 1
        pages.extra = {"made": made}
        found = kept.index()["made"]
        pages.extra = {"made": -1}
        assert kept.index()["made"] == found
        return bool(found == made)

    def write(kind: str, step: int) -> None:
        late.write(kind, step, growing.read(kind, step))

    assert changed() and not changed()
    for change in (
        lambda: late.log({"step": 10}), lambda: late.log({"step": 20}),
        *(lambda kind=kind, step=step: write(kind, step) for step in (10, 20, 10) for kind in ("rollouts", "credit")),
        lambda: write("evidence", 10), lambda: (late.path / "evaluations.jsonl").write_text("{}"),
        lambda: (late.path / "config.toml").write_text(""), lambda: (late.path / "result.json").write_text("{}"),
        lambda: (late.path / "result.json").unlink(),
        lambda: (late.path / "compare").mkdir() or (late.path / "compare" / "shown.json").write_text("{}"),
    ):  # fmt: skip
        time.sleep(0.01)  # the clock of a file system is coarse
        change()
        assert changed() and not changed()
    assert kept.chunk("step-1") == pages.chunk("step-1")
    (tmp_path / "late").rename(tmp_path / "gone")
    assert changed() and not changed()


def test_a_line_of_metrics_that_is_being_written_is_none_yet(growing: RunFolder) -> None:
    own, file = OwnFiles(growing.path), growing.path / "metrics.jsonl"
    whole = file.read_bytes()
    steps = [row["step"] for row in growing.metrics()]
    line = json.dumps({"step": 30, "reward": 0.5, "note": "é"}, ensure_ascii=False).encode()
    for cut in range(len(line)):
        file.write_bytes(whole + line[:cut])
        assert [row["step"] for row in own.metrics()] == steps, line[:cut]
    for end in (b"", b"\n", b"\n\n"):
        file.write_bytes(whole + line + end)
        assert [row["step"] for row in own.metrics()] == [*steps, 30]
    file.write_bytes(b"")
    assert own.metrics() == []
    for wrong in (b'{"step": 30, "lo\n', b"[1]\n", b"7\n", b'{"reward": 1}\n', b"\xff\n", b'{"step": []}\n'):
        file.write_bytes(whole + wrong + line)
        with pytest.raises(
            InputError, match=r"metrics\.jsonl, line 3: got .*; expected a JSON object with `step` in it"
        ):
            own.metrics()
