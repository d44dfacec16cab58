"""Evaluation: avg@n, pass@k and maj@k on problem sets, with intervals, and paired comparisons of models."""

from apportion.evaluate.benches import AVG6, BENCHES, columns_by_set, load_sets
from apportion.evaluate.compare import compare
from apportion.evaluate.plan import Settings
from apportion.evaluate.policy import Policy, open_policy
from apportion.evaluate.run import evaluate
from apportion.evaluate.sources import Columns

__all__ = [
    "AVG6",
    "BENCHES",
    "Columns",
    "Policy",
    "Settings",
    "columns_by_set",
    "compare",
    "evaluate",
    "load_sets",
    "open_policy",
]
