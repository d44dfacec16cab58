"""Numbers worked out by hand; each stands in golden/methods.json beside its equation and source."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from apportion.credit.registry import make_method
from apportion.groups import Base
from apportion.measure.evidence import Continuations, Evidence
from apportion.rollouts import Rollouts

CASES = json.loads((Path(__file__).parents[1] / "golden" / "methods.json").read_text())


def base_of(given: dict[str, Any], rows: int) -> Base:
    return Base(
        torch.tensor(given["advantage"], dtype=torch.float32),
        torch.full((rows,), given["mean"], dtype=torch.float64),
        torch.full((rows,), given["scale"], dtype=torch.float64),
        torch.ones(rows, dtype=torch.bool),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden(case: dict[str, Any]) -> None:
    masks = case.get("masks") or [[1] * n for n in case["lengths"]]
    rollouts = Rollouts.from_lists(
        [list(range(len(mask))) for mask in masks],
        case.get("groups") or ["a"] * len(masks),
        case["rewards"],
        mask=masks,
    )
    method = make_method(case["method"], case["settings"])
    base = base_of(case["base"], len(masks)) if "base" in case else method.base(rollouts)
    evidence = Evidence(Continuations.from_rewards(rollouts, case.get("evidence", [])))
    token = method.assign(rollouts, evidence, base).token
    wanted = torch.tensor([float(a) for row in case["advantages"] for a in row])
    torch.testing.assert_close(token, wanted, rtol=2e-6, atol=2e-7)
