"""What a method asks an engine to measure: one frozen record a kind. What comes back is in `evidence`.

Methods name rows and positions only. The host that carries a job out knows token ids, gold answers and cues.
Shapes: _K pivots, _N flat tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from apportion.rollouts import Rollouts

Kind = Literal["continuations", "belief", "sensitivity", "confidence", "divergence"]
Representation = Literal["last", "answer_mean", "answer_joint"]


@dataclass(frozen=True)
class Job:
    """One prefix to continue: the tokens of response `row` before `position`, after its prompt.

    `samples` continuations are asked for; `pivots` lists every (row, position) that they serve, the job's own
    first. Several responses of a group may open with the same tokens: that state is measured once. `score`
    says why it was chosen, NaN where nothing ranked it.
    """

    kind: ClassVar[Kind] = "continuations"

    row: int
    position: int
    samples: int
    pivots: tuple[tuple[int, int], ...]
    score: float = field(default=float("nan"), compare=False)


@dataclass(frozen=True)
class BeliefJob:
    """The gold answer's log-probability after `cue`, at each of `positions` of response `row` (0: the prompt).

    A position may be the response's end. Answered by `evidence.Belief`.

    Attributes:
        per_token: divided by the answer's number of tokens, whose exponential is a geometric mean.
    """

    kind: ClassVar[Kind] = "belief"

    row: int
    positions: tuple[int, ...]
    cue: str
    per_token: bool = False


@dataclass(frozen=True)
class SensitivityJob:
    """How much each of the first `reasoning` tokens of a response bears on its own answer.

    Answered by `evidence.Importance`, 0 from `reasoning` on.

    Attributes:
        answer: positions of the answer's tokens, start and end; the cue lies between `reasoning` and its start.
        estimator: "perturb" replaces each token by the pad id; "gradient" takes one backward pass to the embeddings.
        representation: of the answer, see OAR.
        noise: standard deviation of the noise on embeddings ("gradient" only). seed: of that noise.
    """

    kind: ClassVar[Kind] = "sensitivity"

    row: int
    reasoning: int
    answer: tuple[int, int]
    estimator: Literal["perturb", "gradient"]
    representation: Representation
    noise: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class ConfidenceJob:
    """Short answers forced by `cue` at each of `positions`: `samples` sampled ones of at most `tokens` tokens.

    Answered by `evidence.Confidence`. A position may be the response's end.
    """

    kind: ClassVar[Kind] = "confidence"

    row: int
    positions: tuple[int, ...]
    cue: str
    samples: int
    tokens: int


@dataclass(frozen=True)
class DivergenceJob:
    """How a response's next-token distributions move when what it was shown is blanked, and when it is disturbed.

    Answered by `evidence.Importance`: KL(p ‖ p without it) · exp(−KL(p ‖ p with it disturbed)), one value a token.
    What it was shown is a marked span of the prompt, or an image; the host knows which.

    Attributes:
        disturb: share of the span's tokens that are replaced in the disturbed prompt. seed: of which and by what.
    """

    kind: ClassVar[Kind] = "divergence"

    row: int
    disturb: float
    seed: int = 0


AnyJob = Job | BeliefJob | SensitivityJob | ConfidenceJob | DivergenceJob


def jobs_of(rollouts: Rollouts, row: Tensor, position: Tensor, samples: int, score: Tensor) -> list[Job]:
    """Folds K pivots, in their order of preference, into jobs with distinct prefixes within each group."""
    digest = prefix_digests(rollouts, row, position)
    pivots: dict[tuple[int, bytes], list[int]] = {}
    for k, state in enumerate(zip(rollouts.group[row].tolist(), digest, strict=True)):
        pivots.setdefault(state, []).append(k)
    where, scores = list(zip(row.tolist(), position.tolist(), strict=True)), score.tolist()
    return [Job(*where[ks[0]], samples, tuple(where[k] for k in ks), scores[ks[0]]) for ks in pivots.values()]


def prefix_digests(rollouts: Rollouts, row: Tensor, position: Tensor) -> list[bytes]:
    """For each of K pivots a digest of its response's tokens before it. Linear in the tokens of each row."""
    ids = rollouts.token_ids.numpy()
    first = rollouts.offsets[:-1][row]
    out = [b""] * len(row)
    at, seen = -1, 0
    for start, end, k in sorted(zip(first.tolist(), (first + position).tolist(), range(len(row)), strict=True)):
        if start != at:
            at, seen, state = start, start, hashlib.blake2b(digest_size=16)
        state.update(ids[seen:end].tobytes())
        seen = end
        out[k] = state.digest()
    return out
