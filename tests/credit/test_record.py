"""The Credit record and the registry.

Planted in a copy of the package and seen caught here: a conservation error that is always 0; a mask that is not
applied; a base rounded before it is spread.
"""

from __future__ import annotations

import pytest
import torch

from apportion.credit.record import Conserves, Credit, conservation_error, nothing
from apportion.credit.registry import BUILT_IN, make_method, method_class, method_names
from apportion.errors import InputError
from apportion.rollouts import Rollouts


def rollouts() -> Rollouts:
    return Rollouts.from_lists([[1, 2], [3], []], ["p", "p", "q"], [1.0, 0.0, 1.0], mask=[[1, 1], [1], []])


@pytest.mark.parametrize(
    "conserves, wanted",
    [
        # Row 0 has 1 + 2 against 2·1: .5 a token, 1 in sum. Row 1 has −2 against −1: −1 both ways.
        ("token_mean", 1.0),
        ("token_sum", 1.0),
        ("group_sum", 0.0),
        ("none", None),
    ],
)
def test_conservation_error(conserves: Conserves, wanted: float | None) -> None:
    token, base = torch.tensor([1.0, 2.0, -2.0]), torch.tensor([1.0, -1.0, 5.0])
    assert conservation_error(rollouts(), token, base, conserves) == wanted


def test_conservation_error_is_the_mean_or_the_sum() -> None:
    token, base = torch.tensor([1.0, 4.0, -1.0]), torch.tensor([1.0, -1.0, 0.0])
    # Row 0: 5 against 2, so 1.5 a token and 3 in sum, over the group too.
    errors = [conservation_error(rollouts(), token, base, c) for c in ("token_mean", "token_sum", "group_sum")]
    assert errors == [1.5, 3.0, 3.0]


def test_form() -> None:
    part = Rollouts.from_lists([[1, 2, 3], [4]], ["p", "p"], [1.0, 0.0], mask=[[1, 0, 1], [1]])
    credit = Credit.form(
        part, torch.tensor([2.0, -1.0]), method="m", settings={}, conserves="none",
        weight=torch.tensor([0.5, 9.0, 1.5, 1.0]), residual=torch.tensor([0.25, torch.nan, 0.0, -1.0]),
    )  # fmt: skip
    assert credit.token.tolist() == [1.25, 0.0, 3.0, -2.0]
    with pytest.raises(InputError, match=r"base: got shape \(3,\); expected shape \(2,\)"):
        Credit.form(part, torch.zeros(3), method="m", settings={}, conserves="none")


def test_a_base_that_counts_for_nothing() -> None:
    """The weight is 0 on every token, though one number holds it, and the credit is the residual."""
    part = Rollouts.from_lists([[1, 2], [3]], ["p", "p"], [1.0, 0.0])
    residual = torch.tensor([0.25, -0.5, 3.0], dtype=torch.float64)
    weight = nothing(residual)
    credit = Credit.form(
        part, torch.tensor([2.0, -1.0]), method="m", settings={}, conserves="none", weight=weight, residual=residual
    )
    assert weight.tolist() == [0.0] * 3 and weight.dtype == torch.float64
    assert credit.token.tolist() == residual.tolist()


@pytest.mark.parametrize("part", [None, 0])
def test_what_float32_cannot_hold_is_refused_by_row(part: int | None) -> None:
    """Both where the base stands for all tokens and where tokens differ; a masked token may hold anything."""
    batch = Rollouts.from_lists([[1], [2, 3], [4]], ["p"] * 3, [1.0, 0.0, 1.0], mask=[[0], [1, 1], [1]])
    residual = None if part is None else torch.zeros(4, dtype=torch.float64)
    base = torch.tensor([1e300, 1e300, 0.0], dtype=torch.float64)
    with pytest.raises(InputError, match="m: advantage of row 1"):
        Credit.form(batch, base, method="m", settings={}, conserves="none", residual=residual)
    base[1] = 2.0
    if residual is not None:
        residual[3] = 1e300
        with pytest.raises(InputError, match="m: advantage of row 2"):
            Credit.form(batch, torch.zeros(3), method="m", settings={}, conserves="none", residual=residual)
        residual[3] = 0.0
    credit = Credit.form(batch, base, method="m", settings={}, conserves="none", residual=residual)
    assert credit.token.tolist() == [0.0, 2.0, 2.0, 0.0]


def test_registry() -> None:
    assert set(BUILT_IN) <= set(method_names())
    for name in method_names():
        cls = method_class(name)
        assert cls.name == name and cls.paper and cls.marks and make_method(name).settings
    with pytest.raises(InputError, match="did you mean 'probepo'"):
        make_method("probpo")
