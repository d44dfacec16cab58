"""The numbers of one step, from the frozen batch, its probes and its credit.

Shapes: _N flat tokens, _P groups.
"""

from __future__ import annotations

import numpy as np
import torch

from apportion.credit.record import Credit
from apportion.engines.base import Cost
from apportion.groups import group_stats
from apportion.measure.readings import Measurement
from apportion.rollouts import Rollouts


def step_metrics(rollouts: Rollouts, credit: Credit, measured: Measurement, actor: int, cost: Cost) -> dict[str, float]:
    """Name → value. Tokens and continuations are of all ranks; values that do not exist this step are left out.

    Args:
        actor: tokens generated for the rollouts; in trees those that responses share count once.
        cost: what all ranks spent beyond what TRL does for GRPO.

    credit/acr: share of the groups with several scored responses whose rewards are all equal.
    credit/abstained: responses without a verdict, which count in no statistic.
    credit/zero_variance: share of all groups with nothing to compare, singletons and unscored ones included.
    credit/p99_abs_advantage: 99th percentile of |A| over trainable tokens.
    credit/error/NAME: measured error of each invariant; `conserved` is what the method promises to keep.
    credit/NAME: the method's counts, such as pivots and dropped_pivots.
    probe/tokens: generated for measuring; probe/ratio: those over the rollouts' (tokens/actor).
    probe/continuations: graded ones. probe/rescued_frac: share of them that were cut off and rescued.
    measure/forwards, forward_tokens, backwards, backward_tokens: passes beyond GRPO's, those for entropies and a
    reference model among them; padding counts, and a decoding step is a forward.
    probe/logprob_gap, probe/logprob_gap_mean: largest and mean difference, in nats, between the probing engine's and
    the trainer's own log-probabilities of tokens before a probe.
    """
    stats = group_stats(rollouts)
    several = stats.count >= 2
    advantage = credit.token[rollouts.mask].abs().numpy()
    probes = measured.probes
    found = {
        "credit/acr": float(stats.collapsed[several].double().mean()) if several.any() else None,
        "credit/zero_variance": float(stats.collapsed.double().mean()),
        "credit/abstained": float(torch.isnan(rollouts.reward).sum()),
        "credit/p99_abs_advantage": float(np.quantile(advantage, 0.99)) if len(advantage) else None,
        "tokens/actor": float(actor),
        "probe/tokens": float(cost.generated),
        "probe/ratio": cost.generated / max(actor, 1),
        "probe/continuations": float(len(probes)),
        "probe/rescued_frac": sum(p.rescued for p in probes) / max(len(probes), 1),
        "probe/logprob_gap": measured.gap.largest if measured.gap.tokens else None,
        "probe/logprob_gap_mean": measured.gap.mean if measured.gap.tokens else None,
        **{f"measure/{name}": float(number) for name, number in vars(cost).items() if name != "generated"},
        **{f"credit/error/{name}": error for name, error in credit.invariants.items()},
        **{f"credit/{name}": float(number) for name, number in credit.counts.items()},
    }
    return {name: value for name, value in found.items() if value is not None}
