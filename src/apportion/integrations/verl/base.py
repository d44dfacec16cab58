"""μ and divisor of verl's GRPO, in verl's own arithmetic, checked against the advantages that verl computed.

Shapes: _R responses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apportion.errors import InputError
from apportion.integrations.verl.versions import found_version

# verl's default, which its trainer does not change.
_EPSILON = 1e-6


def verl_base(
    rewards_R: Tensor, group_R: Tensor, advantage_R: Tensor, normalised: bool, compared_R: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[R] float32 μ and divisor that verl's GRPO took of each response's group.

    The divisor is σ + 1e-6, σ the sample deviation, or 1 where verl does not divide. A response that is alone in its
    group has μ = 0 and σ = 1: verl's advantage of it is its reward. A group whose rewards are all equal has the μ and
    σ that verl's float32 sums give. NaN where verl's are.

    Args:
        rewards_R: float32, in the order of the rows that verl was given: a sum over a group's members in another order
            may end in another bit.
        group_R: integers, equal within a group.
        advantage_R: float32, verl's own advantage of each response.
        normalised: verl's `algorithm.norm_adv_by_std_in_grpo`.
        compared_R: bool, False where verl's advantage cannot be read: a response without a trainable token has no
            place that it stands at. All are compared where left out.

    Raises:
        InputError: rewards or advantages that are not float32, or of different lengths.
        RuntimeError: (r − μ)/divisor is not, bit for bit, the advantage that verl computed.

    Source: verl's `compute_grpo_outcome_advantage`, by its behaviour.
    """
    for field, value in (("rewards", rewards_R), ("advantage", advantage_R)):
        if value.dtype != torch.float32 or value.shape != group_R.shape or value.ndim != 1:
            got = f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
            raise InputError(field, got, f"float32 of shape ({len(group_R)},), one a response")
    mean_R, scale_R = torch.zeros_like(rewards_R), torch.ones_like(rewards_R)
    # A stable sort leaves the members of a group in their order.
    order = torch.argsort(group_R, stable=True)
    sizes = torch.unique_consecutive(group_R[order], return_counts=True)[1].tolist()
    for members in order.split(sizes) if sizes else ():
        own = rewards_R[members]
        deviation = own.new_ones(())
        if len(own) > 1:
            mean_R[members] = own.mean()
            deviation = own.std()
        if normalised:
            scale_R[members] = deviation + _EPSILON
    _check((rewards_R - mean_R) / scale_R, advantage_R, normalised, compared_R)
    return mean_R, scale_R


def _check(made_R: Tensor, advantage_R: Tensor, normalised: bool, compared_R: Tensor | None) -> None:
    """Raises RuntimeError where an advantage is not what verl's rule makes of its reward."""
    differ = (made_R != advantage_R) & ~(made_R.isnan() & advantage_R.isnan())
    if compared_R is not None:
        differ &= compared_R
    if not differ.any():
        return
    row = int(differ.nonzero()[0])
    rule = f"(r − μ)/(σ + {_EPSILON:g})" if normalised else "r − μ"
    raise RuntimeError(
        f"verl {found_version('verl')} computed no advantage of GRPO by {rule}: row {row} has "
        f"{float(advantage_R[row])!r}, its reward makes {float(made_R[row])!r}, and {int(differ.sum())} rows of "
        f"{len(made_R)} differ. Its μ and σ are what credit is measured in, so training stops here; set "
        "algorithm.adv_estimator=grpo, or install a verl that the plugin's tests name"
    )
