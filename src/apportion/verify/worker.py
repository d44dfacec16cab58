"""The child process of `pool`: reads one JSON job a line, writes the stage it is in, then the result.

Lines out: {"ready": true} once; for each job {"stage": name} before each part, then {"result": ...} or
{"error": text}. Started as `python -c` with the parent's `sys.path`, so that it imports what the parent imports.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

# The parent kills at the deadline; this alarm ends the process even if the parent is gone or stopped by then.
# With the default action the kernel ends us, inside a big-integer operation too.
GRACE_S = 2.0


def _math(job: dict[str, Any], stage: Callable[[str], None]) -> dict[str, Any]:
    from apportion.verify.math import MathSettings, decide

    return asdict(decide(job["golds"], job["answer"], MathSettings(**job["settings"]), stage))


def _check_math(job: dict[str, Any], stage: Callable[[str], None]) -> str | None:
    from apportion.verify.math import unreadable_gold

    stage("gold")
    return unreadable_gold(job["golds"])


TASKS: dict[str, Callable[[dict[str, Any], Callable[[str], None]], Any]] = {"math": _math, "check_math": _check_math}


def _warm_up() -> None:
    """The first formulas through a fresh parser take 100 ms each; pay before saying "ready"."""
    from apportion.verify.scalars import parse_scalar, same_value

    first = parse_scalar(r"\frac{1}{2}+\sqrt{3}x^{2}-\sin(\pi)")
    same_value(first, parse_scalar("x"), 1e-6)


def main() -> None:
    """Serve jobs until standard input ends. `argv[1]` is the address space limit in MiB."""
    limit = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Nothing a library prints may get between our lines.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    _warm_up()
    say(ready=True)
    for line in sys.stdin:
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, job["wall_s"] + GRACE_S)
        try:
            result = TASKS[job["task"]](job, lambda name: say(stage=name))
        except MemoryError:
            # What is left of the heap after this is anybody's guess; the parent starts another process.
            say(error="out of memory")
            return
        except Exception as error:  # sympy raises almost anything on hostile input; the parent decides what it means
            say(error=f"{type(error).__name__}: {str(error)[:200]}")
        else:
            say(result=result)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
