"""A frozen generation batch as every host hands it to a method, with the data that its prompts came from.

Shapes: _R responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from apportion.groups import Base, group_stats, live_rows
from apportion.rollouts import Rollouts

# Where a data set's accepted answers are looked for, in this order.
GOLD_COLUMNS = ("answer", "gold", "solution", "ground_truth")
# Kinds of measurement that read the model without sampling rewards from it.
READ = frozenset({"belief", "sensitivity", "confidence", "divergence"})
# Steps, and where a response states its answer, are found in its text.
READ_IN_TEXT = frozenset({"steps", "step_labels", "belief", "sensitivity", "confidence"})


@dataclass(frozen=True)
class Batch:
    """All responses of a generation batch, of all ranks, the same on each.

    Attributes:
        rows: the data set's row of each response. prompts: each response's prompt as text.
        local: which responses are this rank's; all of them where one process has them.
    """

    rollouts: Rollouts
    base: Base
    rows: list[dict[str, Any]]
    prompts: list[str]
    local: slice = field(default_factory=lambda: slice(None))

    @property
    def golds(self) -> list[str]:
        """The first gold answer of each row, for the records."""
        return [next(iter(answers_of(row)), "") for row in self.rows]


def answers_of(row: Mapping[str, Any]) -> list[str]:
    """The accepted answers of a data set row: its first gold column that is not empty; none where it has none."""
    gold = next((row[column] for column in GOLD_COLUMNS if row.get(column) not in (None, "")), None)
    if gold is None:
        return []
    return [str(each) for each in gold] if isinstance(gold, list | tuple) else [str(gold)]


def base_of(rollouts: Rollouts, mean_R: Tensor, scale_R: Tensor, advantage_R: Tensor) -> Base:
    """A host's own μ, divisor and advantages, as methods read them. μ and divisor are NaN where nothing was scored."""
    return Base(
        advantage_R.float().cpu(),
        mean_R.double().nan_to_num(nan=0.0).cpu(),
        scale_R.double().nan_to_num(nan=1.0).cpu(),
        live_rows(rollouts, group_stats(rollouts)),
    )
