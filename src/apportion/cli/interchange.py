"""`plan`, `assign` and `grade`: credit and verdicts for other trainers, from file to file, with no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from apportion.cli.shared import read_lines, read_settings, say, tracked, whole_file

if TYPE_CHECKING:
    from apportion.credit.method import CreditMethod
    from apportion.interchange import Batch, Row
    from apportion.verify import Verdict

CHUNK = 64
"""Rows that `grade` reads before it judges them."""

Source = Annotated[str, typer.Argument(metavar="IN.jsonl", help="One JSON object a line; - for standard input.")]
Method = Annotated[str, typer.Option("--method", "-m", metavar="NAME", help="See `apportion methods`.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting; may be given several times."),
]
Output = Annotated[
    str,
    typer.Option("--output", "-o", metavar="OUT.jsonl", help="Written whole or not at all; - for standard output."),
]


def plan(source: Source, method: Method, setting: Settings = None, output: Output = "-") -> None:
    """Print what a method would have measured, one request a line; nothing is spent.

    With --set allocation=neyman and a pilot's evidence in the file, these are the second wave's requests.
    """
    from apportion import interchange
    from apportion.measure.plan import Kind

    batch, chosen = _load(source, method, setting)
    lines = list(interchange.request_lines(batch, interchange.plan(batch, chosen)))
    if not {*get_args(Kind)} & chosen.needs:
        say("note", f"{chosen.name} asks no engine to measure anything, so there is nothing to request")
    elif not lines:
        say("note", f"nothing to request: see `apportion methods {chosen.name}` for what decides where to measure")
    with whole_file(output) as file:
        file.writelines(lines)


def assign(source: Source, method: Method, setting: Settings = None, output: Output = "-") -> None:
    """Compute every token's advantage from rewards and evidence; the rows come back in order with it."""
    from apportion import interchange

    batch, chosen = _load(source, method, setting)
    credit = interchange.assign(batch, chosen)
    lost = credit.counts.get("dropped_pivots", 0)
    if lost:
        say("warning", f"{lost} pivots without a single graded continuation were dropped")
    if unmeasured := credit.counts.get("unmeasured_tokens", 0):
        say("warning", f"{unmeasured} tokens stand before their response's first measured state and get 0")
    # All lines are made before the first is written, so that an error leaves nothing half written.
    lines = list(tracked(interchange.credit_lines(batch, credit), "rows made ready"))
    with whole_file(output) as file:
        file.writelines(lines)


def grade(
    source: Source,
    output: Output = "-",
    setting: Settings = None,
    allow_local_code: Annotated[
        bool,
        typer.Option("--allow-local-code", help="Run programs and proofs (`code`, `lean`) in the local sandbox."),
    ] = False,
) -> None:
    """Grade `prediction` against `gold` by `kind` (math, choice, exact, code, lean), row by row, in order.

    Each row gains `verdict` (correct, wrong, abstain), `reason`, `extracted_gold`, `extracted_prediction`.
    """
    from apportion import interchange
    from apportion.verify.code import LOCAL_CODE_OFF

    settings = _verifier_settings(setting or [])
    if allow_local_code:
        for kind in ("code", "lean"):
            settings[kind]["allow_local_code"] = True
    numbered = interchange.objects(read_lines(source))
    not_run = 0
    with whole_file(output) as file:
        for number, row, verdict in tracked(_graded(numbered, settings), "rows graded"):
            not_run += verdict.reason == LOCAL_CODE_OFF
            found = {
                "verdict": verdict.outcome,
                "reason": verdict.reason,
                "extracted_gold": verdict.gold,
                "extracted_prediction": verdict.prediction,
            }
            file.write(interchange.to_line({**row, **found}, number))
    if not_run:
        say("hint", f"{not_run} rows of kind code abstained, for {LOCAL_CODE_OFF}")


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    step: Annotated[int | None, typer.Option("--step", min=0, help="The last one recorded if left out.")] = None,
    output: Output = "-",
) -> None:
    """Write a recorded step as an interchange file, with its evidence: `apportion assign` computes its credit again."""
    from apportion import interchange
    from apportion.errors import InputError
    from apportion.records import RunFolder

    folder = RunFolder(run)
    steps = folder.recorded_steps()
    number = steps[-1] if step is None else step
    if number not in steps:
        raise InputError("--step", number, f"a recorded one, {steps[0]} to {steps[-1]}")
    rows = interchange.recorded_rows(*(folder.read(kind, number) for kind in ("rollouts", "evidence", "credit")))
    with whole_file(output) as file:
        file.writelines(interchange.to_line(row, i) for i, row in enumerate(tracked(rows, "rows written"), 1))


def _graded(
    numbered: Iterator[tuple[int, Row]], settings: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[int, Row, Verdict]]:
    """(line number, row, verdict) in order. A chunk at a time: its rows are judged side by side."""
    from apportion.interchange import lines_for_rows, text_field
    from apportion.verify import grade_many

    while chunk := list(islice(numbered, CHUNK)):
        lines, rows = zip(*chunk, strict=True)
        for number, row in chunk:
            text_field(row, "kind", number)
        with lines_for_rows(lines, absent={}):
            verdicts = grade_many(rows, settings)
        yield from zip(lines, rows, verdicts, strict=True)


def _verifier_settings(pairs: list[str]) -> dict[str, dict[str, Any]]:
    """The settings of each kind of verifier. A setting goes to every kind that knows it."""
    from apportion.errors import InputError, nearest
    from apportion.verify import VERIFIERS

    out: dict[str, dict[str, Any]] = {kind: {} for kind in VERIFIERS}
    known = {
        kind: {field.name: field.default for field in fields(verifier.settings)} for kind, verifier in VERIFIERS.items()
    }
    for name, value in read_settings(pairs).items():
        kinds = [kind for kind in known if name in known[kind]]
        if not kinds:
            names = sorted({each for settings in known.values() for each in settings})
            raise InputError(f"--set {name}", "an unknown setting", f"one of {', '.join(names)}{nearest(name, names)}")
        for kind in kinds:
            default = known[kind][name]
            if isinstance(default, float) and type(value) is int:
                value = float(value)
            if type(value) is not type(default):
                raise InputError(f"--set {name}", repr(value), f"a value such as {default!r}")
            out[kind][name] = value
    for kind, verifier in VERIFIERS.items():
        verifier.settings(**out[kind])
    return out


def _load(source: str, name: str, setting: list[str] | None) -> tuple[Batch, CreditMethod]:
    """The file as a batch, and the method with its settings. Warns of groups with a single response."""
    from apportion import interchange
    from apportion.credit.registry import make_method

    method = make_method(name, read_settings(setting or []))
    batch = interchange.read(tracked(interchange.objects(read_lines(source)), "rows read"))
    alone = interchange.singletons(batch) if method.grouped else []
    if alone:
        say(
            "warning",
            f"{len(alone)} responses (the first on line {alone[0]}) are alone in their group with a reward; "
            f"{method.name} compares the responses of a group, so they get advantage 0",
        )
    return batch, method
