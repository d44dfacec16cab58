"""A recorded step read back: the batch, the credit it got, what was measured, and which steps were right.

Shapes: _N flat tokens, _R responses, _S segments.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apportion.credit.record import Segments
from apportion.errors import InputError
from apportion.measure.evidence import Belief, StepLabels
from apportion.records import RunFolder
from apportion.rollouts import Rollouts
from apportion.tasks import check_steps, parse_problem
from apportion.train.settings import CONFIG_FILE, RunConfig, load_config

Row = Mapping[str, Any]
# Prompts and responses as text; for each response (character, ok) of its steps, or None.
Checker = Callable[[Sequence[str], Sequence[str]], Sequence[Sequence[tuple[int, bool]] | None]]


@dataclass(frozen=True)
class Recorded:
    """One step of a run.

    Attributes:
        rollouts: R responses, in the order of the record.
        advantage: [N] float64; base: [R] float64, the advantage that was spread.
        segments: every segment that the method recorded; none for methods that have none.
        method, settings: as used.
        sample: R numbers, each response's in its group. prompts, golds: R texts.
        prompt: [R] int64, equal for responses to the same prompt, in whatever step.
        evidence: rows of the record.
    """

    step: int
    rollouts: Rollouts
    advantage: Tensor
    base: Tensor
    segments: Segments
    method: str
    settings: Mapping[str, Any]
    sample: tuple[int, ...]
    prompts: tuple[str, ...]
    golds: tuple[str, ...]
    prompt: np.ndarray
    evidence: Sequence[Row]


def choose_steps(folder: RunFolder, text: str | None) -> list[int]:
    """The recorded steps that `text` names, such as "3,10-20" or "last 5"; all of them where it is None.

    A range takes the steps in it that were recorded.

    Raises:
        InputError: a run without recorded steps, a text of another form, or one that names no recorded step.
    """
    recorded = folder.recorded_steps()
    if text is None:
        return recorded
    expected = f"steps such as 1,5-9 or last 5; recorded are {recorded[0]} to {recorded[-1]}, {len(recorded)} in all"
    if match := re.fullmatch(r"\s*last\s+([1-9][0-9]*)\s*", text):
        return recorded[-int(match[1]) :]
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        found = {step for step in recorded if low <= step <= high}
        if not found:
            raise InputError("--steps", repr(part), expected)
        chosen |= found
    return sorted(chosen)


def read_step(folder: RunFolder, step: int) -> Recorded:
    """The step as it was recorded.

    Raises:
        InputError: rollouts and credit that do not stand row for row, or a record that no batch can be made of.
    """
    rows, credit = folder.read("rollouts", step), folder.read("credit", step)
    if not rows or [row["row"] for row in rows] != [row["row"] for row in credit]:
        raise InputError(
            f"RUN, step {step}", f"{len(rows)} rollouts and {len(credit)} rows of credit", "the same rows in both",
            "record the step again; one of its files is not this step's",
        )  # fmt: skip
    rollouts = rollouts_of(rows)
    advantage = torch.tensor([a for row in credit for a in row["advantage"]], dtype=torch.float64)
    if len(advantage) != len(rollouts.token_ids):
        raise InputError(f"RUN, step {step}", f"{len(advantage)} advantages", f"{len(rollouts.token_ids)}, one a token")
    return Recorded(
        step, rollouts, advantage, torch.tensor([row["base"] for row in credit], dtype=torch.float64),
        _segments([row["segments"] or [] for row in credit]), credit[0]["method"], json.loads(credit[0]["settings"]),
        tuple(row["sample"] for row in rows), tuple(row["prompt"] or "" for row in rows),
        tuple(row["gold"] or "" for row in rows),
        np.array([_identity(row, step) for row in rows], dtype=np.int64), folder.read("evidence", step),
    )  # fmt: skip


def rollouts_of(rows: Sequence[Row]) -> Rollouts:
    """The batch of a step's `rollouts` rows. An optional column counts where every row has it."""

    def column(name: str) -> list[Any] | None:
        values = [row[name] for row in rows]
        return None if any(value is None for value in values) else values

    boundaries, prompts, text = column("boundaries"), column("prompt_ids"), column("text")
    flags = None
    if boundaries is not None:
        flags = [
            [t in here for t in range(len(row["token_ids"]))]
            for row, here in zip(rows, map(set, boundaries), strict=True)
        ]
    first = {row["group"]: i for i, row in reversed(list(enumerate(rows)))}
    groups = dict.fromkeys(row["group"] for row in rows)
    return Rollouts.from_lists(
        [row["token_ids"] for row in rows], [row["group"] for row in rows], [row["reward"] for row in rows],
        mask=[row["mask"] for row in rows], truncated=[row["finish"] == "length" for row in rows],
        old_logprob=column("old_logprob"), entropy=column("entropy"), boundary=flags,
        prompt_ids=None if prompts is None else tuple(torch.tensor(prompts[first[group]]) for group in groups),
        text=None if text is None else tuple(text), char_start=None if text is None else column("char_start"),
    )  # fmt: skip


def run_config(folder: Path) -> RunConfig | str:
    """The run's configuration, or why there is none: most diagnostics do without."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return f"the run folder has no {CONFIG_FILE}"
    try:
        return load_config(path)
    except InputError as error:
        return f"{CONFIG_FILE} cannot be used ({error.field}: got {error.got})"


def checker_of(config: RunConfig | str) -> Checker | str:
    """The exact step checker of the embedded task that the run was trained on, or why there is none."""
    if isinstance(config, str):
        return config
    if config.data.path is not None:
        return "its problems come from a file, which has no step checker"
    modulus = config.data.modulus

    def check(prompts: Sequence[str], responses: Sequence[str]) -> list[list[tuple[int, bool]]]:
        return [
            check_steps(parse_problem(prompt, modulus), text) for prompt, text in zip(prompts, responses, strict=True)
        ]

    return check


def step_labels(recorded: Recorded, checker: Checker | str) -> StepLabels | str:
    """Which steps were right: a recorded step verifier's verdicts, else the checker's; or why there are none."""
    rollouts = recorded.rollouts
    verdicts = [row for row in recorded.evidence if row["kind"] == "steps"]
    if verdicts:
        entries = [(row["row"], row["position"], bool(row["values"][0])) for row in verdicts]
        return StepLabels.from_entries(rollouts, entries, sorted({row for row, _, _ in entries}))
    if isinstance(checker, str):
        return f"no step verifier's verdicts are recorded, and {checker}"
    if rollouts.text is None or rollouts.char_start is None:
        return "the record has no text with offsets for the step checker"
    try:
        verdicts_R = checker(recorded.prompts, rollouts.unstopped_text())
    except ValueError as error:
        return f"the run's task does not know a recorded prompt ({error})"
    return StepLabels.from_verdicts(rollouts, verdicts_R)


def belief_of(recorded: Recorded) -> Belief | None:
    """The belief evidence of the step; None where none was recorded."""
    rows = [row for row in recorded.evidence if row["kind"] == "belief"]
    if not rows:
        return None
    entries = [(row["row"], row["position"], row["values"][0]) for row in rows]
    return Belief.from_entries(recorded.rollouts, entries, sorted({row for row, _, _ in entries}))


def _segments(pieces: Sequence[Sequence[Row]]) -> Segments:
    flat = [(i, piece) for i, row in enumerate(pieces) for piece in row]
    whole = ("start", "end", "samples")
    return Segments(
        row=torch.tensor([i for i, _ in flat], dtype=torch.int64),
        **{
            f.name: torch.tensor(
                [torch.nan if piece[f.name] is None else piece[f.name] for _, piece in flat], dtype=torch.float64
            ).to(torch.int64 if f.name in whole else torch.float64)
            for f in fields(Segments) if f.name != "row"
        },
    )  # fmt: skip


def _identity(row: Row, step: int) -> int:
    """A prompt is known by its token ids, else its text; without either each group of a step is a prompt."""
    name = row["prompt_ids"] or row["prompt"] or (step, row["group"])
    return int.from_bytes(hashlib.blake2b(repr(name).encode(), digest_size=7).digest(), "little")
