"""Random batches and evidence: hypothesis draws the shapes that matter, a seed fills in the rest."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from apportion.measure.evidence import Continuations, Evidence
from apportion.rollouts import Rollouts
from reference import Response

NAN = float("nan")
# NaN: the verifier abstained.
REWARDS = (0.0, 1.0, 0.0, 1.0, 0.9, 0.25, -1.0, NAN)

# (row, position, rewards) with None for a continuation without a reward.
Entries = list[tuple[int, int, list[float | None]]]


@dataclass
class Batch:
    """The same responses for the package and for the reference, with what was measured on them."""

    responses: list[Response]
    entries: Entries

    def rollouts(self) -> Rollouts:
        rows = self.responses
        return Rollouts.from_lists(
            [y.ids for y in rows],
            [y.group for y in rows],
            [y.reward for y in rows],
            mask=[y.mask for y in rows],
            # A masked token has no statistics; a host may well leave NaN there.
            entropy=[[h if m else NAN for h, m in zip(y.entropy, y.mask, strict=True)] for y in rows],
            old_logprob=[[-h if m else NAN for h, m in zip(y.entropy, y.mask, strict=True)] for y in rows],
            boundary=[[t in y.starts for t in range(len(y.ids))] for y in rows],
        )

    def evidence(self) -> Evidence:
        return Evidence(Continuations.from_rewards(self.rollouts(), self.entries))

    def measured(self) -> dict[tuple[int, int], list[float]]:
        return {(row, at): [r for r in rewards if r is not None] for row, at, rewards in self.entries}


@st.composite
def batches(draw: st.DrawFn, rewards: tuple[float, ...] = REWARDS) -> Batch:
    """Up to four groups of up to five responses of 0 to 48 tokens, standing in any order."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    fill = random.Random(draw(st.integers(0, 2**32)))
    longest = draw(st.sampled_from([1, 3, 12, 48]))
    masked = draw(st.sampled_from([0.0, 0.2, 0.9]))
    names = [f"g{g}" for g, size in enumerate(sizes) for _ in range(size)]
    fill.shuffle(names)
    responses = []
    for name in names:
        length = fill.choice([0, 1, longest, *range(longest)])
        responses.append(
            Response(
                # Few different tokens, so that responses of a group share openings.
                ids=[fill.choice([0, 0, 0, 1]) for _ in range(length)],
                group=name,
                reward=fill.choice(rewards),
                mask=[fill.random() >= masked for _ in range(length)],
                # Eighths are exact in float32, and few enough to tie.
                entropy=[fill.randrange(24) / 8 for _ in range(length)],
                starts=[t for t in range(length) if fill.random() < 0.2],
            )
        )
    entries: Entries = [
        (i, at, [fill.choice((0.0, 1.0, 1.0, 0.25, None)) for _ in range(fill.randrange(6))])
        for i, y in enumerate(responses)
        for at in range(len(y.ids))
        if fill.random() < 0.15
    ]
    fill.shuffle(entries)
    return Batch(responses, entries)
