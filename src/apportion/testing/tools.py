"""What the laws of `conformance` are tried on: batches, an oracle that answers requests, and a work counter.

Rewards of the oracle are a hash of the state's tokens, as a real engine's depend on the state alone.
"""

from __future__ import annotations

import gc
import hashlib
import math
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from apportion.credit.method import CreditMethod
from apportion.credit.record import Credit
from apportion.groups import Base
from apportion.measure.evidence import Belief, Confidence, Continuations, Evidence, Importance, StepLabels
from apportion.measure.plan import AnyJob, BeliefJob, ConfidenceJob, Job, SensitivityJob
from apportion.rollouts import Rollouts

NAN = float("nan")


@dataclass
class Entries:
    """What an engine brought back, by kind, as the host would hand it to `evidence`.

    `belief` is (row, position, logprob), `confidence` (row, position, conf, acc), `steps` (row, start, ok),
    `importance` row → one value a token. `answer` is row → where its own answer starts.
    """

    continuations: list[tuple[int, int, list[float | None]]] = field(default_factory=list)
    belief: list[tuple[int, int, float]] = field(default_factory=list)
    confidence: list[tuple[int, int, float, float]] = field(default_factory=list)
    steps: list[tuple[int, int, bool]] = field(default_factory=list)
    importance: dict[int, list[float]] = field(default_factory=dict)
    answer: dict[int, int] = field(default_factory=dict)

    def restricted(self, rows: list[int]) -> Entries:
        """Those of these rows, renumbered to their places in the list."""
        place = {row: i for i, row in enumerate(rows)}

        def kept(entries: list[Any]) -> list[Any]:
            return [(place[row], *rest) for row, *rest in entries if row in place]

        return Entries(
            kept(self.continuations), kept(self.belief), kept(self.confidence), kept(self.steps),
            {place[row]: values for row, values in self.importance.items() if row in place},
            {place[row]: at for row, at in self.answer.items() if row in place},
        )  # fmt: skip

    def shuffled(self, seed: int) -> Entries:
        """The same in another order, continuations one by one."""
        pieces = [(row, at, [r]) for row, at, rewards in self.continuations for r in rewards]

        def mixed(entries: list[Any]) -> list[Any]:
            return random.Random(seed).sample(entries, len(entries))

        return Entries(
            mixed(pieces), mixed(self.belief), mixed(self.confidence), mixed(self.steps),
            dict(self.importance), dict(self.answer),
        )  # fmt: skip


def rows_batch(rows: Iterable[dict[str, Any]], seed: int = 0) -> Rollouts:
    """A batch from dicts with `group`, `reward` and either `length` or `mask`; the rest is random.

    A response of at least 12 tokens states an answer at its end. Every ninth token starts a step and, in the tree,
    an edge; odd and even responses of a group share their first node.
    """
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            "ids", "group", "reward", "mask", "entropy", "logprob", "ref", "boundary", "chars", "text", "path",
        )
    }  # fmt: skip
    for number, row in enumerate(rows):
        uid = row.get("uid", number)
        fill = random.Random(f"{seed}/{uid}")
        mask = row.get("mask", [1] * row.get("length", 0))
        n = len(mask)
        columns["ids"].append([fill.randrange(2, 100) for _ in range(n)])
        columns["group"].append(row["group"])
        columns["reward"].append(row["reward"])
        columns["mask"].append(mask)
        # NaN is what a host may leave where a token was not sampled.
        columns["entropy"].append([fill.uniform(0, 3) if m else NAN for m in mask])
        columns["logprob"].append([-fill.uniform(0, 3) if m else NAN for m in mask])
        columns["ref"].append([-fill.uniform(0, 3) if m else NAN for m in mask])
        columns["boundary"].append([t % 9 == 5 for t in range(n)])
        columns["chars"].append(list(range(n)))
        columns["text"].append("x" * n if n < 12 else "x" * (n - 9) + r"\boxed{7}")
        edges = 1 + len(range(5, n, 9))
        first = f"{row['group']}/{uid % 2}" if edges > 1 else str(uid)
        columns["path"].append((first, *(f"{uid}.{d}" for d in range(1, edges))))
    return Rollouts.from_lists(
        columns["ids"], columns["group"], columns["reward"],
        mask=columns["mask"], entropy=columns["entropy"], old_logprob=columns["logprob"],
        ref_logprob=columns["ref"], boundary=columns["boundary"], char_start=columns["chars"],
        text=tuple(columns["text"]), path=tuple(columns["path"]),
    )  # fmt: skip


def mixed_batch() -> Rollouts:
    """Everything at once: mixed, collapsed, single and abstained groups; masked, empty and one-token rows."""
    tool_call = [1] * 20 + [0] * 6 + [1] * 14
    return rows_batch(
        [
            {"group": "a", "reward": 1.0, "length": 61},
            {"group": "b", "reward": 0.0, "mask": tool_call},
            {"group": "single", "reward": 1.0, "length": 30},
            {"group": "a", "reward": 0.0, "length": 1},
            {"group": "equal", "reward": 0.5, "length": 33},
            {"group": "b", "reward": 0.75, "length": 45},
            {"group": "a", "reward": 0.25, "mask": [0] * 7 + [1] * 40 + [0] * 3},
            {"group": "abstained", "reward": None, "length": 12},
            {"group": "b", "reward": None, "length": 26},
            {"group": "a", "reward": 1.0, "length": 0},
            {"group": "equal", "reward": 0.5, "length": 8},
            {"group": "b", "reward": 1.0, "mask": [0] * 10},
            {"group": "a", "reward": 0.0, "length": 37},
            {"group": "b", "reward": 0.125, "length": 52},
            {"group": "abstained", "reward": None, "length": 5},
        ]
    )


def oracle(rollouts: Rollouts, row: int, position: int, m: int) -> float | None:
    """The reward of continuation m of a state: a hash of its group and tokens, None now and then."""
    start = int(rollouts.offsets[row])
    tokens = rollouts.token_ids[start : start + position].tolist()
    word = hashlib.blake2b(f"{rollouts.name(row)}/{tokens}/{m}".encode(), digest_size=2).digest()
    return None if word[0] < 16 else float(word[1] % 5 > 2)


def reading(rollouts: Rollouts, row: int, position: int, what: str) -> float:
    """A number in [0, 1) that depends on the state alone, as a real reading does."""
    start = int(rollouts.offsets[row])
    tokens = rollouts.token_ids[start : start + position].tolist()
    word = hashlib.blake2b(f"{rollouts.name(row)}/{tokens}/{what}".encode(), digest_size=2).digest()
    return int.from_bytes(word, "big") / 2**16


def answered(rollouts: Rollouts, jobs: Iterable[AnyJob], first: int = 0) -> Entries:
    """What an engine would answer: continuations for every pivot that a job serves, and a reading a state."""
    found = Entries()
    for job in jobs:
        row = job.row
        if isinstance(job, Job):
            found.continuations += [
                (i, at, [oracle(rollouts, row, job.position, first + m) for m in range(job.samples)])
                for i, at in job.pivots
            ]
        elif isinstance(job, BeliefJob):
            found.belief += [(row, p, math.log1p(-reading(rollouts, row, p, "belief"))) for p in job.positions]
        elif isinstance(job, ConfidenceJob):
            found.confidence += [
                (row, p, reading(rollouts, row, p, "conf"), reading(rollouts, row, p, "acc")) for p in job.positions
            ]
        else:
            end = job.reasoning if isinstance(job, SensitivityJob) else int(rollouts.length[row])
            values = [4 * reading(rollouts, row, p, "importance") ** 3 for p in range(end)]
            found.importance[row] = values + [0.0] * (int(rollouts.length[row]) - end)
            if isinstance(job, SensitivityJob):
                found.answer[row] = end
    return found


def measure(method: CreditMethod, rollouts: Rollouts, base: Base | None = None) -> Entries:
    """What an engine would bring back for both waves of requests, and a step verifier for every step."""
    base = method.base(rollouts) if base is None else base
    entries = answered(rollouts, method.plan(rollouts, base))
    wave = method.refine(rollouts, base, evidence_of(rollouts, entries))
    entries.continuations += answered(rollouts, wave, first=100).continuations
    assert rollouts.boundary is not None
    entries.steps = [
        (row, at, reading(rollouts, row, at, "ok") < 0.7)
        for row, at, starts in zip(
            rollouts.row.tolist(), rollouts.position.tolist(), rollouts.boundary.tolist(), strict=True
        )
        if starts or at == 0
    ]
    return entries


def evidence_of(rollouts: Rollouts, entries: Entries) -> Evidence:
    """Every kind is there. A row with nothing in it was measured: it had no gold answer and no step."""
    rows = range(len(rollouts))
    length = rollouts.length.tolist()
    return Evidence(
        continuations=Continuations.from_rewards(rollouts, entries.continuations),
        belief=Belief.from_entries(rollouts, entries.belief, rows),
        confidence=Confidence.from_entries(rollouts, entries.confidence, rows),
        steps=StepLabels.from_entries(rollouts, entries.steps, rows),
        importance=Importance.from_rows(rollouts, [entries.importance.get(i, [0.0] * n) for i, n in enumerate(length)]),
        answer_start=torch.tensor([entries.answer.get(i, -1) for i in rows], dtype=torch.int64),
    )


def credit(
    method: CreditMethod, rollouts: Rollouts, entries: Entries | None = None, base: Base | None = None
) -> Credit:
    """The method's credit, measured first where no entries are given."""
    base = method.base(rollouts) if base is None else base
    entries = measure(method, rollouts, base) if entries is None else entries
    return method.assign(rollouts, evidence_of(rollouts, entries), base)


def by_row(rollouts: Rollouts, values: Tensor) -> list[Tensor]:
    return list(values.split(rollouts.length.tolist()))


def assert_rows(got: list[Tensor], wanted: list[Tensor]) -> None:
    """Equal up to the order in which float64 sums were taken, which float32 shows in its last bit at most."""
    assert [len(row) for row in got] == [len(row) for row in wanted]
    for number, (row, other) in enumerate(zip(got, wanted, strict=True)):
        assert torch.allclose(row, other, rtol=1e-6, atol=1e-7), f"row {number}: {row} is not {other}"


def on_subset(method: CreditMethod, rollouts: Rollouts, entries: Entries, rows: list[int]) -> list[Tensor]:
    """The credit that these rows get when they are the whole batch."""
    part = rollouts.select(rows)
    return by_row(part, credit(method, part, entries.restricted(rows)).token)


def groups_of(rollouts: Rollouts) -> list[list[int]]:
    return [(rollouts.group == g).nonzero()[:, 0].tolist() for g in range(rollouts.groups)]


def tensors(*records: Any) -> list[Tensor]:
    values = [getattr(record, f.name) for record in records for f in fields(record)]
    return [value for value in values if isinstance(value, Tensor)]


@dataclass
class Work:
    """How much a call did: tensor operations, and Python instructions outside torch."""

    operations: int = 0
    instructions: int = 0


class _Counter(TorchDispatchMode):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.work.operations += 1
        return func(*args, **(kwargs or {}))


def work_of(call: Callable[[], object]) -> Work:
    """Counts instead of timing, so that a busy machine cannot change the answer."""
    work = Work()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        module = frame.f_globals.get("__name__", "")
        if module == __name__ or module.partition(".")[0] == "torch":
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        work.instructions += event == "opcode"
        return trace

    before, collecting = sys.gettrace(), gc.isenabled()
    with _Counter(Work()):
        call()  # torch imports parts of itself at its first use
    # Others hang callbacks on the collector, which runs when it likes.
    gc.disable()
    with _Counter(work):
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(before)
            if collecting:
                gc.enable()
    return work
