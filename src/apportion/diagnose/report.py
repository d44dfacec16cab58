"""Every diagnostic of a run as one line: a number with its interval and what it says, or why there is none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apportion.diagnose.forks import ForkSettings
from apportion.diagnose.lines import SAMPLED, Line
from apportion.diagnose.model import Bench
from apportion.diagnose.reading import Recorded, checker_of, choose_steps, read_step, run_config
from apportion.diagnose.recorded import recorded_lines
from apportion.diagnose.sampled import sampled_lines
from apportion.records import RunFolder
from apportion.train.settings import RunConfig

RECENT = 8
"""Steps, the last ones chosen, to whose responses the lines that sample from the model keep."""


@dataclass(frozen=True)
class Report:
    """The lines of a run's steps, in the order of `lines.ABOUT`, and what was spent on those that need the model."""

    steps: Sequence[int]
    lines: Sequence[Line]
    spent: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"steps": list(self.steps), "lines": [line.as_json() for line in self.lines], "spent": dict(self.spent)}


def diagnose(
    run: Path,
    steps: str | None = None,
    bench: Callable[[RunConfig], Bench] | str = "none was asked for",
    settings: ForkSettings | None = None,
    budget: int = 100_000,
    progress: Callable[[str], None] = lambda doing: None,
) -> Report:
    """All diagnostics of a run folder.

    Args:
        steps: which recorded steps, see `choose_steps`.
        bench: opens the model that is sampled from; or why there is none.
        settings: of the lines that sample from it. budget: the most tokens that they generate together.
        progress: called with what is being done.

    Raises:
        InputError: no run, no such step, a record that does not fit together, or a model that cannot be used.
    """
    folder = RunFolder(run)
    chosen = choose_steps(folder, steps)
    config = run_config(run)
    recent: deque[Recorded] = deque(maxlen=RECENT)

    def read() -> Iterator[Recorded]:
        for step in chosen:
            progress(f"reading step {step}")
            recent.append(read_step(folder, step))
            yield recent[-1]

    lines = recorded_lines(read(), checker_of(config))
    opened: Bench | str = bench if isinstance(bench, str) else config if isinstance(config, str) else bench(config)
    spent: dict[str, Any] = {}
    if isinstance(opened, str):
        lines += [Line.without(name, f"needs a model: {opened}") for name in SAMPLED]
    else:
        lines += sampled_lines(list(recent), opened, settings or ForkSettings(), budget, progress)
        spent = {
            "model": opened.name, "generated_tokens": opened.cost.generated, "continuations": opened.continuations,
            "tokens_read_to_redraw": opened.cost.forward_tokens, "budget": budget,
        }  # fmt: skip
    return Report(chosen, lines, spent)
