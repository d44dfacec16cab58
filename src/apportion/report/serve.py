"""Serves the pages of a run while it is trained: on loopback, read-only, to pages of its own address alone.

Other pages in the same browser can send requests to any port of this machine, and a name of theirs can be made to
point here (DNS rebinding). So a request must name this server as its host, and must not say that it comes from
elsewhere.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import re
import socket
import socketserver
import stat
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Protocol

from apportion.errors import InputError
from apportion.records import RunFolder
from apportion.report.escape import embeddable_json, one_line

ADDRESS, PORT, NEXT = "127.0.0.1", 8765, 20
"""Where it listens: the first port that is free from `PORT` on, any other where the `NEXT` ones are all taken."""

IDLE, HEAD, SEND = 30.0, 10.0, 30.0
"""Seconds: for a request to begin, to be whole, to be answered."""

HEAD_BYTES, CONNECTIONS, FINDING = 64 * 1024, 64, 2

_LINE = re.compile(rb"[!-~]+ [!-~]+ HTTP/1\.[01]\r?\n")
_CHUNK = re.compile(r"/chunk/((?:step|compare)-[0-9]{1,9}(?:-row-[0-9]{1,9})?)")
_SINGLE = ("metrics.jsonl", "evaluations.jsonl", "config.toml", "result.json")
COMPARED, SHOWN = "compare", "compare/shown.json"  # of apportion.compare.store; the second is written last
_KINDS = ("rollouts", "evidence", "credit")
_HTML, _JSON, _TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"
_HEADERS = (
    ("Content-Security-Policy", "frame-ancestors 'none'"),  # the rest of the policy stands in the page
    ("X-Frame-Options", "DENY"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),
    ("Vary", "Accept-Encoding"),
)


class Pages(Protocol):
    """What is served; called from several threads."""

    def index(self) -> dict[str, Any]: ...

    def chunk(self, key: str, /) -> dict[str, Any]:
        """Raises InputError where there is nothing of that name."""


def inside(folder: Path, path: Path) -> bool:
    """Whether `path`, with every link in it followed, is `folder` or stands in it."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # links in a circle
        return False


class OwnFiles(RunFolder):
    """A run folder of which nothing is read that lies elsewhere: links out of it are not followed.

    A step whose file is such a link, or no plain file, counts as not recorded; of other files it is an error.
    """

    def read(self, kind: str, step: int) -> list[dict[str, Any]]:
        file = self._file(kind, step)
        return super().read(kind, step) if inside(self.path, file.parent) and self._own(file) else []

    def steps(self) -> list[int]:
        """The steps of which rollouts and credit are there, rising."""
        if not all(inside(self.path, self.path / kind) for kind in ("rollouts", "credit")):
            return []
        return [step for step in super().steps() if all(self._own(self._file(k, step)) for k in ("rollouts", "credit"))]

    def metrics(self) -> list[dict[str, Any]]:
        """Every step's metrics; none where nothing has been logged yet.

        Raises:
            InputError: as `check`; or a line is not the metrics of a step.
        """
        self.check()
        return super().metrics() if (self.path / "metrics.jsonl").exists() else []

    def check(self) -> None:
        """That the other files of a run, which are read by their names, are its own.

        Raises:
            InputError: one of them, or anything below `compare`, leads out of the folder or is no plain file.
        """
        files = [self.path / name for name in _SINGLE]
        compared = self.path / COMPARED
        wrong = [file for file in files if self._foreign(file)]
        wrong += [compared] * (not inside(self.path, compared))
        for place, folders, names in os.walk(compared) if not wrong else ():
            wrong += [path for path in (Path(place, name) for name in folders) if not inside(self.path, path)]
            wrong += [path for path in (Path(place, name) for name in names) if self._foreign(path)]
        if wrong:
            raise InputError(str(wrong[0]), "a link out of the folder, or no plain file", "a file of the run's own")

    def links_out(self) -> list[str]:
        """The folders and files of steps that are not read, for they lead out of the folder."""
        kinds = [self.path / kind for kind in _KINDS]
        files = [file for kind in kinds if inside(self.path, kind) for file in sorted(kind.glob("step-*.parquet"))]
        candidates = [*kinds, *filter(Path.is_symlink, files)]
        return [str(path.relative_to(self.path)) for path in candidates if not inside(self.path, path)]

    def stamp(self) -> list[tuple[int, int, int] | None]:
        """What differs once a file of the run has been written or appended to, without reading any."""
        stamps: list[tuple[int, int, int] | None] = []
        for name in (*_SINGLE, *_KINDS, SHOWN):
            try:
                found = (self.path / name).stat()
            except OSError:
                stamps.append(None)
            else:
                stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
        return stamps

    def _own(self, path: Path) -> bool:
        return path.exists() and not self._foreign(path)

    def _foreign(self, path: Path) -> bool:
        """Whether something stands there that is no plain file, here or at the end of a link that stays inside.

        The folder that it stands in is not looked at.
        """
        try:
            mode = path.lstat().st_mode
        except OSError:  # nothing, or nothing any more: files are replaced while a run goes on
            return False
        return not (inside(self.path, path) and path.is_file()) if stat.S_ISLNK(mode) else not stat.S_ISREG(mode)


class Guarded:
    """Pages of a run that reads no file but its own, and whose index is made again only once the run has changed.

    That takes up to a second of a long run, on the machine that trains it.
    """

    def __init__(self, pages: Pages, folder: OwnFiles) -> None:
        self._pages, self._folder = pages, folder
        self._kept: tuple[list[Any], dict[str, Any]] | None = None
        self._lock = threading.Lock()

    def index(self) -> dict[str, Any]:
        self._folder.check()
        with self._lock:
            # Taken first, so that what is written meanwhile is a change.
            stamp = self._folder.stamp()
            if self._kept is None or self._kept[0] != stamp:
                self._kept = stamp, self._pages.index()
            return self._kept[1]

    def chunk(self, key: str, /) -> dict[str, Any]:
        self._folder.check()
        return self._pages.chunk(key)


class Server(socketserver.ThreadingTCPServer):
    """Answers `/`, `/index.json` and `/chunk/KEY` with what it is given; no name of a request is a name of a file.

    Args:
        pages: the data.
        shell: the HTML that asks for them.
        port: to listen on; 0 for any that is free.
        told: takes one line about a request that failed for a reason of ours.

    Raises:
        OSError: the port cannot be listened on.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS
    allow_reuse_address = os.name != "nt"  # on Windows that would let another program take the port

    def __init__(self, pages: Pages, shell: str, port: int = 0, told: Callable[[str], None] = lambda line: None):
        self.pages, self.shell, self.told = pages, shell.encode(), told
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        self._turn = threading.Semaphore(FINDING)
        super().__init__((ADDRESS, port), Handler)
        self.port: int = self.server_address[1]
        names = ("127.0.0.1", "localhost", "[::1]")
        self.hosts = {f"{name}:{self.port}" for name in names} | set(names if self.port == 80 else ())
        self.url = f"http://{ADDRESS}:{self.port}/"

    def run(self) -> None:
        """Serves until Ctrl-C, and ends the process."""
        try:
            self.serve_forever()
        except KeyboardInterrupt:
            # Not by an ordinary exit: a thread that is cut off while it reads Parquet aborts the process, and taking
            # the libraries down takes seconds. There is nothing to be saved.
            os._exit(0)

    def find(self, target: str) -> tuple[str, bytes] | None:
        """The type and bytes of a target, compared as it was sent: no decoding, no dots, no query.

        At most `FINDING` at a time: the machine is there for the training.
        """
        if target == "/":
            return _HTML, self.shell
        asked = _CHUNK.fullmatch(target)
        if target != "/index.json" and not asked:
            return None
        with self._turn:
            if not asked:
                return _JSON, embeddable_json(self.pages.index()).encode()
            try:
                return _JSON, embeddable_json(self.pages.chunk(asked[1])).encode()
            except InputError:
                return None

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            try:
                return super().process_request(request, client_address)
            except BaseException:
                self._free.release()
                raise
        request.setblocking(False)
        with contextlib.suppress(OSError):
            request.send(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        request.close()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is no news; what fails in an answer, the handler tells."""


class _TooLong(Exception):
    """The head of a request has more than `HEAD_BYTES`."""


class _Incoming(io.RawIOBase):
    """What a client sends, within the limits of time and size for one head at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.expect()

    def expect(self) -> None:
        self._end, self._left, self._begun = time.monotonic() + IDLE, HEAD_BYTES, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            raise _TooLong
        if (seconds := self._end - time.monotonic()) <= 0:
            raise TimeoutError
        self._connection.settimeout(seconds)
        got = self._connection.recv_into(buffer, min(len(buffer), self._left))
        self._left -= got
        if not self._begun:
            self._begun, self._end = True, time.monotonic() + HEAD
        return got


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    # The default so that an answer has headers even to a line that names no version.
    protocol_version = default_request_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes, and the second would wait for the first's answer

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._incoming = _Incoming(self.connection)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        self._incoming.expect()
        self.command, self.request_version, self.close_connection = "", self.default_request_version, True
        try:
            self.raw_requestline = self.rfile.readline()
            if not self.raw_requestline:
                return
            if not _LINE.fullmatch(self.raw_requestline):
                return self.send_error(HTTPStatus.BAD_REQUEST)
            if self.parse_request():
                self._answer()
        except _TooLong:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except OSError:  # with a time-out, or gone
            self.close_connection = True

    def handle_expect_100(self) -> bool:
        return True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is the reader's."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """One line, in our words: `message` can hold what the client sent."""
        self._send(HTTPStatus(code), _TEXT, f"{code} {HTTPStatus(code).phrase}\n".encode())

    def _answer(self) -> None:
        if refusal := self._refusal():
            status, words = refusal
            more = [("Allow", "GET, HEAD")] if status is HTTPStatus.METHOD_NOT_ALLOWED else []
            return self._send(status, _TEXT, f"{words}\n".encode(), more)
        try:
            found = self.server.find(self.requestline.split()[1])
        except Exception as error:
            self.server.told(f"{type(error).__name__} in {one_line(self.requestline, 80)}: {one_line(str(error), 400)}")
            return self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
        if found is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        kind, body = found
        # Weak: the same for the body as it is and compressed.
        tag = f'W/"{hashlib.blake2b(body, digest_size=16).hexdigest()}"'
        if _names(self.headers.get("If-None-Match", ""), tag):
            return self._send(HTTPStatus.NOT_MODIFIED, kind, b"", [("ETag", tag)])
        more = [("ETag", tag)]
        if _accepts_gzip(self.headers.get("Accept-Encoding", "")):
            body = gzip.compress(body, 5, mtime=0)
            more.append(("Content-Encoding", "gzip"))
        self._send(HTTPStatus.OK, kind, body, more)

    def _refusal(self) -> tuple[HTTPStatus, str] | None:
        """Why the request is not looked at."""
        headers = self.headers
        if headers.defects:
            return HTTPStatus.BAD_REQUEST, "These are no headers."
        if headers.get("Transfer-Encoding") or headers.get("Content-Length", "0").strip() != "0":
            # Its body is not read, so what follows on the connection cannot be told from it.
            self.close_connection = True
        host, origin = headers.get_all("Host", []), headers.get_all("Origin", [])
        if len(host) != 1 or host[0].strip(" \t") not in self.server.hosts:
            return HTTPStatus.MISDIRECTED_REQUEST, f"This server answers to {self.server.url} alone."
        ours = f"http://{host[0].strip()}"
        sites = {site.strip() for site in headers.get_all("Sec-Fetch-Site", [])}
        if any(each.strip() != ours for each in origin) or not sites <= {"same-origin", "none"}:
            return HTTPStatus.FORBIDDEN, f"Not from another page: put {self.server.url} into the address bar yourself."
        if self.command not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, "This server can only be read from."
        return None

    def _send(self, status: HTTPStatus, kind: str, body: bytes, more: list[tuple[str, str]] | None = None) -> None:
        if status >= HTTPStatus.BAD_REQUEST and status is not HTTPStatus.NOT_FOUND:
            self.close_connection = True
        self.send_response_only(status)
        for name, value in (*_HEADERS, ("Content-Type", kind), *(more or ())):
            self.send_header(name, value)
        if status is not HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close" if self.close_connection else "keep-alive")
        self.connection.settimeout(SEND)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _names(condition: str, tag: str) -> bool:
    """Whether an If-None-Match names the tag, weak or not."""
    named = {each.strip().removeprefix("W/") for each in condition.split(",")}
    return "*" in named or tag.removeprefix("W/") in named


def _accepts_gzip(accepted: str) -> bool:
    for each in accepted.split(","):
        name, _, weight = each.partition(";")
        if name.strip().lower() == "gzip":
            return not re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", weight, re.IGNORECASE)
    return False


def listen(pages: Pages, shell: str, port: int | None, told: Callable[[str], None]) -> Server:
    """A server on `port`, or on the first that is free where none is asked for.

    Raises:
        InputError: the port is taken or not ours to take.
    """
    for tried in [*range(PORT, PORT + NEXT), 0] if port is None else [port]:
        try:
            return Server(pages, shell, tried, told)
        except OSError as error:
            problem = error.strerror
    raise InputError("--port", f"{port}: {problem}", "a port that is free, or 0 for any")
