"""Kinds of measurement that read the model's own forward passes: planned jobs become requests, readings evidence.

A host translates its jobs, spreads the requests over its ranks as it likes, and gets readings back by kind and row.
Shapes: none, these are records.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from apportion.engines.base import (
    BeliefRequest,
    ConfidenceRequest,
    ContinuationEngine,
    DivergenceRequest,
    Key,
    Reading,
    Sampling,
    Scoring,
    SensitivityRequest,
)
from apportion.engines.belief import beliefs
from apportion.engines.confidence import confidences
from apportion.engines.divergence import divergences
from apportion.engines.scoring import Scorer
from apportion.engines.sensitivity import sensitivities
from apportion.errors import InputError
from apportion.measure.batch import Batch, answers_of
from apportion.measure.evidence import Belief, Confidence, Evidence, Importance
from apportion.measure.gap import Gap
from apportion.measure.plan import AnyJob, BeliefJob, ConfidenceJob, DivergenceJob, Job, SensitivityJob
from apportion.measure.wave import Probe, balanced
from apportion.segments import token_offsets

At = tuple[str, int]
"""What is read: kind and row. A plan asks for each at most once."""


@dataclass(frozen=True)
class Measurement:
    """What was measured on a batch, by all ranks.

    Attributes:
        evidence: for the method. probes: every graded continuation, in no particular order.
        gap: between the log-probabilities of what made the continuations and those of what is trained.
        read: rows for the run's records, of the kinds that are no continuations.
    """

    evidence: Evidence = field(default_factory=Evidence)
    probes: Sequence[Probe] = ()
    gap: Gap = field(default_factory=Gap)
    read: Sequence[dict[str, Any]] = ()


class Asker:
    """Jobs with token ids in place of names.

    Args:
        tokenizer: of transformers, with a pad token. decode: token ids to text, special tokens included.
        seed: starts every random stream, with the kind behind it: kinds share none.
    """

    def __init__(self, tokenizer: Any, decode: Callable[[Sequence[int]], str], seed: str) -> None:
        self.tokenizer, self.decode, self.seed = tokenizer, decode, seed

    def requests(self, batch: Batch, jobs: Sequence[AnyJob], step: int) -> dict[At, Scoring]:
        """(kind, row) → request, in the order of the jobs; a job without a gold answer to ask about has none.

        Raises:
            InputError: a `span` that is no part of its prompt, or two jobs of a kind for one row.
        """
        found: dict[At, Scoring] = {}
        for job in jobs:
            if isinstance(job, Job):
                continue
            if (job.kind, job.row) in found:
                raise InputError(f"{job.kind} of row {job.row}", "two jobs", "one, with all of the row's positions")
            request = self._request(batch, job, key_of(batch, job.row, f"{self.seed}/{job.kind}", step))
            if request is not None:
                found[job.kind, job.row] = request
        return found

    def _request(self, batch: Batch, job: AnyJob, key: Key) -> Scoring | None:
        rollouts = batch.rollouts
        assert rollouts.prompt_ids is not None
        prompt = rollouts.prompt_ids[int(rollouts.group[job.row])].tolist()
        start, end = rollouts.offsets[job.row : job.row + 2].tolist()
        response = rollouts.token_ids[start:end].tolist()
        whole: dict[str, Any] = {"key": key, "ids": (*prompt, *response), "prompt": len(prompt)}
        if isinstance(job, SensitivityJob):
            return SensitivityRequest(
                **whole, reasoning=job.reasoning, answer=job.answer, estimator=job.estimator,
                representation=job.representation, noise=job.noise, seed=job.seed,
            )  # fmt: skip
        if isinstance(job, DivergenceJob):
            blank, disturbed = self._altered(prompt, batch.rows[job.row]["span"], job, key)
            return DivergenceRequest(**whole, blank_ids=blank, disturbed_ids=disturbed)
        assert isinstance(job, BeliefJob | ConfidenceJob)
        golds = [self._ids(answer) for answer in answers_of(batch.rows[job.row])]
        if not golds:
            return None
        asked = {**whole, "positions": job.positions, "cue_ids": self._ids(job.cue)}
        if isinstance(job, BeliefJob):
            return BeliefRequest(**asked, answers=tuple(golds), per_token=job.per_token)
        return ConfidenceRequest(**asked, gold_ids=golds[0], samples=job.samples, tokens=job.tokens)

    def _altered(self, prompt: list[int], span: str, job: DivergenceJob, key: Key) -> tuple[tuple[int, ...], ...]:
        """The prompt with the span's tokens blanked by the pad id, and with a share of them drawn anew from the span.

        [ours]: what stands for a blank and for a disturbed image in a text.
        """
        starts, text = token_offsets(self.decode, prompt, [])
        at = text.find(span)
        if at < 0 or not span:
            raise InputError(f"span of prompt {key.prompt}", repr(span)[:60], "a part of the prompt as it is tokenized")
        inside = [t for t, start in enumerate(starts) if at <= start < at + len(span)]
        pad = self.tokenizer.pad_token_id
        blank, disturbed = list(prompt), list(prompt)
        draw = random.Random(f"{key.run}/{key.step}/{key.prompt}/{job.seed}")
        for t in inside:
            blank[t] = pad
            if draw.random() < job.disturb:
                disturbed[t] = prompt[draw.choice(inside)]
        return tuple(blank), tuple(disturbed)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def read(
    asked: Mapping[At, Scoring],
    scorer: Scorer,
    engine: ContinuationEngine | None = None,
    sampling: Sampling | None = None,
) -> dict[At, Reading]:
    """(kind, row) → what was read for its request, kind by kind.

    Args:
        engine, sampling: what draws answers, and how; only confidence needs them.

    Raises:
        InputError: see the engine of each kind.
    """
    found = {}
    for kind in sorted({kind for kind, _ in asked}):
        rows = {request.key: row for (each, row), request in asked.items() if each == kind}
        requests = [request for (each, _), request in asked.items() if each == kind]
        for reading in _answer(kind, requests, scorer, engine, sampling):
            found[kind, rows[reading.key]] = reading
    return found


def share(asked: Mapping[At, Scoring], rank: int, world: int) -> dict[At, Scoring]:
    """The requests that one of `world` ranks reads, the most work first to the least loaded; some may get none.

    Raises:
        InputError: a rank outside 0 … world−1.
    """
    ats = list(asked)
    return {ats[i]: asked[ats[i]] for i in balanced([_work(asked[at]) for at in ats], rank, world)}


def merged(asked: Mapping[At, Scoring], shares: Sequence[Mapping[At, Reading]]) -> dict[At, Reading]:
    """The readings of all ranks, one for each request, in the order of the requests.

    Raises:
        RuntimeError: a reading that came twice, that was not asked for, or that did not come; names it.
    """
    found: dict[At, Reading] = {}
    for readings in shares:
        for at, reading in readings.items():
            if at not in asked or reading.key != asked[at].key:
                raise RuntimeError(f"{at[0]} of {reading.key}: a reading that was not asked for")
            if at in found:
                raise RuntimeError(f"{at[0]} of {reading.key}: read by two ranks")
            found[at] = reading
    for (kind, row), request in asked.items():
        if (kind, row) not in found:
            raise RuntimeError(f"{kind} of {request.key}: read by no rank")
    return {at: found[at] for at in asked}


def _work(request: Scoring) -> int:
    """About how many tokens a reading computes; a backward pass counts as two forwards [ours]."""
    length = len(request.ids)
    if isinstance(request, BeliefRequest):
        return length + len(request.positions) * sum(len(request.cue_ids) + len(answer) for answer in request.answers)
    if isinstance(request, ConfidenceRequest):
        drawn = request.samples * (len(request.cue_ids) + 2 * request.tokens)
        return length + len(request.positions) * (drawn + len(request.gold_ids))
    if isinstance(request, DivergenceRequest):
        return 3 * length
    assert isinstance(request, SensitivityRequest)
    if request.estimator == "gradient":
        return 4 * length
    # The response from each replaced token on.
    return length + request.reasoning * (2 * (length - request.prompt) - request.reasoning) // 2


def _answer(
    kind: str, requests: Sequence[Any], scorer: Scorer, engine: ContinuationEngine | None, sampling: Sampling | None
) -> Iterator[Reading]:
    if kind == "confidence":
        assert engine is not None and sampling is not None
        return confidences(engine, scorer, requests, sampling)
    answer: dict[str, Callable[..., Iterator[Reading]]] = {
        "belief": beliefs, "sensitivity": sensitivities, "divergence": divergences
    }  # fmt: skip
    return answer[kind](scorer, requests)


def key_of(batch: Batch, row: int, run: str, step: int) -> Key:
    """What is asked about a whole response; `run` starts its random streams."""
    return Key(run, step, batch.rollouts.name(row), batch.rollouts.sample[row], 0)


def evidence_from(
    batch: Batch, jobs: Sequence[AnyJob], readings: dict[At, Reading]
) -> dict[str, Belief | Confidence | Importance | torch.Tensor]:
    """Field of `Evidence` → its record. A row without a reading had nothing to be asked about."""
    rollouts = batch.rollouts
    rows = range(len(rollouts))
    found: dict[str, Any] = {}
    states = [job for job in jobs if isinstance(job, BeliefJob | ConfidenceJob) and (job.kind, job.row) in readings]
    for field_, cls in (("belief", Belief), ("confidence", Confidence)):
        mine = [job for job in states if job.kind == field_]
        entries = [
            (job.row, position, *(value if isinstance(value, list) else [value]))
            for job in mine
            for position, value in zip(job.positions, readings[job.kind, job.row].values.tolist(), strict=True)
        ]
        found[field_] = cls.from_entries(rollouts, entries, rows)
    length = rollouts.length.tolist()
    values = [[0.0] * n for n in length]
    start = [-1] * len(length)
    for job in jobs:
        if isinstance(job, SensitivityJob | DivergenceJob) and (job.kind, job.row) in readings:
            read = readings[job.kind, job.row].values.tolist()
            values[job.row][: len(read)] = read
            start[job.row] = job.reasoning if isinstance(job, SensitivityJob) else length[job.row]
    found["importance"] = Importance.from_rows(rollouts, values)
    found["answer_start"] = torch.tensor(start)
    return found


def reading_rows(
    batch: Batch, jobs: Sequence[AnyJob], readings: dict[At, Reading], found: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row a state, or a response where a value a token was read (see `records.EVIDENCE`)."""
    out: list[dict[str, Any]] = []

    def add(kind: str, key: str, row: int, position: int, values: list[float]) -> None:
        group = batch.rollouts.name(row)
        out.append({"key": key, "kind": kind, "group": group, "row": row, "position": position, "values": values})

    for job in jobs:
        reading = readings.get((job.kind, job.row))
        if reading is None:
            continue
        key = "/".join(map(str, vars(reading.key).values()))
        values = reading.values.tolist()
        if isinstance(job, BeliefJob | ConfidenceJob):
            for position, value in zip(job.positions, values, strict=True):
                add(job.kind, key, job.row, position, value if isinstance(value, list) else [value])
        else:
            start = job.reasoning if isinstance(job, SensitivityJob) else int(batch.rollouts.length[job.row])
            add(job.kind, key, job.row, start, values)
    if (steps := found.get("steps")) is not None:
        for row, start, ok in zip(steps.row.tolist(), steps.start.tolist(), steps.ok.tolist(), strict=True):
            add("steps", "", row, start, [float(ok)])
    return out
