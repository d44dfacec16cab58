"""`apportion watch` as a command: bad input before it serves, a run that comes while it does, Ctrl-C.

Planted faults seen caught: Ctrl-C not caught, a parent folder not looked for, a folder of runs served, links out not
told, the run's folder made.
"""

from __future__ import annotations

import html
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from apportion.cli import app
from apportion.records import RunFolder
from apportion.report.serve import Server


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["watch", *map(str, arguments)])


def refused(result: Result, *parts: str) -> None:
    """Exit code 2 and one line on stderr that holds all the parts."""
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    assert all(part in result.stderr for part in parts), result.stderr


def record(folder: Path, step: int) -> None:
    """A step of two responses of two tokens each."""
    of_run = RunFolder(folder)
    rows = [
        {
            "row": i, "group": "g", "sample": i, "prompt": "p", "gold": "1", "token_ids": [1, 2], "mask": [True, True],
            "text": "ab", "char_start": [0, 1], "reward": float(i), "verdict": "correct" if i else "wrong",
            "finish": "stop",
        }
        for i in range(2)
    ]  # fmt: skip
    credit = [
        {
            "row": i, "advantage": [2 * i - 1.0] * 2, "base": 2 * i - 1.0, "mean": 0.5, "scale": 0.5, "segments": [],
            "method": "grpo", "settings": "{}", "invariants": '{"conserved": 0.0}', "counts": "{}",
        }
        for i in range(2)
    ]  # fmt: skip
    of_run.write("rollouts", step, rows)
    of_run.write("evidence", step, [])
    of_run.write("credit", step, credit)
    of_run.log({"step": step, "reward": 0.5})


def test_bad_input_is_one_line_before_anything_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "run", lambda self: pytest.fail("it serves"))
    expected = "expected the folder of a run, or its name where it will be"
    refused(run(tmp_path / "no" / "run"), f"RUN: got {tmp_path}/no/run, and there is no folder {tmp_path}/no", expected)
    (tmp_path / "file").write_text("")
    refused(run(tmp_path / "file"), f"RUN: got {tmp_path}/file: no folder", expected)
    refused(run(tmp_path / "file" / "run"), "RUN: got ", expected)
    (tmp_path / "dangling").symlink_to("nowhere")
    refused(run(tmp_path / "dangling"), f"RUN: got {tmp_path}/dangling: no folder", expected)
    for name in ("grpo-0", "probepo-0"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").write_text("")
    refused(run(tmp_path / "runs"), "a folder of runs", expected, "Fix: name one: grpo-0, probepo-0")
    (tmp_path / "outside").write_text("secret = 1")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "config.toml").symlink_to("../outside")
    refused(run(tmp_path / "linked"), "linked/config.toml: got a link out of the folder")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(run(tmp_path / "new", "--port", str(port)), f"--port: got {port}: ", "expected a port that is free")
    assert run(tmp_path / "new", "--port", "65536").exit_code == 2
    assert not (tmp_path / "new").exists()


def test_what_it_says_and_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("typer.launch", opened.append)

    def interrupted(self: Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "run", interrupted)
    result = run(tmp_path / "run")
    assert (result.exit_code, opened) == (0, [])
    assert re.fullmatch(r"Page: http://127\.0\.0\.1:\d+/   Ctrl-C ends it\n", result.stdout)
    assert result.stderr == f"note: waiting for the first recorded step in {tmp_path}/run\n"
    record(tmp_path / "run", 1)
    record(tmp_path / "run", 2)
    (tmp_path / "run" / "credit" / "step-000002.parquet").rename(tmp_path / "moved")
    (tmp_path / "run" / "credit" / "step-000002.parquet").symlink_to("../../moved")
    result = run(tmp_path / "run", "--open", "--port", "0")
    assert result.exit_code == 0 and result.stdout == f"Page: {opened[0]}   Ctrl-C ends it\n"
    assert result.stderr == (
        f"note: credit/step-000002.parquet in {tmp_path}/run leads out of the folder and is not shown\n"
    )


class Watching:
    """The real command in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "apportion", "watch", str(folder), "--port", "0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"Page: http://127\.0\.0\.1:(\d+)/ .*\n", line)
        assert found, (line, self.process.communicate(timeout=30))
        self.port = int(found[1])

    def get(self, target: str, **headers: str) -> tuple[int, bytes, str | None]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", target, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        found = answer.status, answer.read(), answer.headers["ETag"]
        connection.close()
        return found

    def index(self) -> dict[str, Any]:
        return json.loads(self.get("/index.json")[1])

    def interrupt(self) -> tuple[float, str, str]:
        """Seconds until it has ended, and what it wrote since."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=60)
        return time.monotonic() - began, out, err


@pytest.fixture
def watching() -> Any:
    begun: list[Watching] = []

    def begin(folder: Path) -> Watching:
        begun.append(Watching(folder))
        return begun[-1]

    yield begin
    for each in begun:
        each.process.kill()
        each.process.communicate(timeout=30)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_comes_while_it_is_watched_until_ctrl_c(
    tmp_path: Path, watching: Callable[[Path], Watching]
) -> None:
    folder = tmp_path / "run"
    server = watching(folder)
    status, shell, _ = server.get("/")
    assert status == 200 and "connect-src 'self'" in html.unescape(shell.decode())
    first = server.index()
    assert (first["steps"], first["live"], first["finished"]) == ([], True, False)
    assert server.get("/chunk/step-1")[0] == 404 and not folder.exists()
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "rew')
    assert server.index()["steps"] == []
    (folder / "metrics.jsonl").write_text("")
    for step in (1, 2):
        record(folder, step)
        assert server.index()["steps"] == list(range(1, step + 1))
        assert json.loads(server.get(f"/chunk/step-{step}")[1])["step"] == step
        assert server.get(f"/chunk/step-{step}-row-1")[0] == 200
    assert server.get(f"/chunk/step-{step}-row-2")[0] == 404
    _, _, tag = server.get("/index.json")
    assert server.get("/index.json", If_None_Match=str(tag))[0] == 304
    (folder / "result.json").write_text("{}")
    assert server.index()["finished"]
    assert server.get("/", Host="evil.example")[0] == 421
    before = files(tmp_path)

    # A client that is connected, one in the middle of a line, and some that ask all the time.
    idle = socket.create_connection(("127.0.0.1", server.port))
    half = socket.create_connection(("127.0.0.1", server.port))
    half.sendall(b"GET /index.js")
    going = threading.Event()

    def asking() -> None:
        while not going.is_set():
            try:
                server.get("/chunk/step-1-row-0")
            except (OSError, http.client.HTTPException):
                return

    askers = [threading.Thread(target=asking) for _ in range(4)]
    for each in askers:
        each.start()
    time.sleep(0.1)
    seconds, out, err = server.interrupt()
    going.set()
    for each in [*askers]:
        each.join()
    idle.close()
    half.close()
    assert server.process.returncode == 0, (out, err)
    assert out == "" and err == f"note: waiting for the first recorded step in {folder}\n"
    assert seconds < 3
    assert files(tmp_path) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), 5)
