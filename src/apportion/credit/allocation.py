"""Neyman allocation of a group's continuations over its pivots, from a pilot.

Shapes: _K pivots, _J jobs (distinct states) of one group.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from apportion.groups import Base
from apportion.measure.evidence import Continuations
from apportion.measure.plan import Job, jobs_of
from apportion.rollouts import Rollouts


def neyman_shares(p: Tensor, weight: Tensor) -> Tensor:
    """[J] shares √(w·v)/Σ√(w·v) with v = p(1−p) [paper, ProbePO appendix A, Eq. 8, as a precision benchmark].

    Numbers [note]: p = (.5, .1), w = (3, 7) gives .522, .478. Equal shares where every v is 0.
    """
    root = (weight * p * (1 - p)).sqrt()
    return root / root.sum() if root.sum() > 0 else torch.full_like(root, 1 / len(root))


def integers(shares: Tensor, total: int, floor: int) -> list[int]:
    """Splits `total` by `shares` into whole numbers of at least `floor`, by largest remainder [ours].

    They sum to `total`. Numbers held at the floor leave the others' proportions as they are. Ties go to the
    earlier entry.

    Raises:
        ValueError: `total` cannot give everyone the floor.
    """
    if total < floor * len(shares):
        raise ValueError(f"{total} cannot be split over {len(shares)} pivots with at least {floor} each")
    held = torch.zeros(len(shares), dtype=torch.bool)
    ideal = shares.double() * total
    while True:
        free = shares.double().masked_fill(held, 0.0)
        left = total - floor * int(held.sum())
        ideal = torch.where(held, float(floor), free / free.sum().clamp(min=1e-300) * left)
        if not (low := ideal < floor).any():
            break
        held = held | low
    whole = ideal.floor().long()
    for at in torch.argsort(whole - ideal, stable=True)[: total - int(whole.sum())].tolist():
        whole[at] += 1
    return whole.tolist()


def neyman(rollouts: Rollouts, base: Base, pilot: Continuations, asked: int, samples: int) -> list[Job]:
    """The second wave: what the pilot left of `samples` a state, by each state's noise and reach [ours].

    The weight of a pivot is (len_k + len_{k+1})/(T_i σ²), the tokens its value touches; states that several
    responses share add theirs up. p is the plug-in (s + 1)/(m + 2), for rewards in [0, 1].

    Args:
        pilot: what came back of `asked` continuations a state. Those that came back without a reward were
            spent all the same, so that both waves together ask for `samples` times the number of states. A
            state of which nothing came back is no pivot and gets no more.
    """
    keep = base.live[pilot.row] & (pilot.position > 0)
    row, position, count = pilot.row[keep], pilot.position[keep], pilot.count[keep]
    if not len(row):
        return []
    p = ((pilot.mean[keep] * count + 1) / (count + 2)).clamp(0, 1)
    follows = row[1:] == row[:-1]
    before, after = torch.zeros_like(position), rollouts.length[row]
    before[1:] = torch.where(follows, position[:-1], 0)
    after[:-1] = torch.where(follows, position[1:], after[:-1])
    weight = (after - before) / (rollouts.length[row] * base.scale[row] ** 2)
    at = {pivot: k for k, pivot in enumerate(zip(row.tolist(), position.tolist(), strict=True))}
    by_group: dict[int, list[Job]] = {}
    for job in jobs_of(rollouts, row, position, samples, torch.full((len(row),), torch.nan)):
        by_group.setdefault(int(rollouts.group[job.row]), []).append(job)
    wave = []
    for jobs in by_group.values():
        first = [at[job.pivots[0]] for job in jobs]
        reach = torch.stack([weight[[at[pivot] for pivot in job.pivots]].sum() for job in jobs])
        whole = integers(neyman_shares(p[first], reach), samples * len(jobs), asked)
        wave += [replace(job, samples=n - asked) for job, n in zip(jobs, whole, strict=True) if n > asked]
    return wave
