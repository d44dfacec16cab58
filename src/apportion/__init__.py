"""apportion: fine-grained credit assignment for critic-free LLM reinforcement learning.

The public names. They are loaded when they are first used: importing the package loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apportion.credit.method import CreditMethod
    from apportion.credit.record import Credit, Segments
    from apportion.credit.registry import make_method, method_names
    from apportion.errors import InputError
    from apportion.groups import Base, GroupStats, group_stats, grpo_base
    from apportion.measure.evidence import Continuations, Evidence
    from apportion.measure.plan import Job
    from apportion.rollouts import Rollouts
    from apportion.verify import Verdict, grade

    __version__: str

_HOME = {
    "Base": "apportion.groups",
    "Continuations": "apportion.measure.evidence",
    "Credit": "apportion.credit.record",
    "CreditMethod": "apportion.credit.method",
    "Evidence": "apportion.measure.evidence",
    "GroupStats": "apportion.groups",
    "InputError": "apportion.errors",
    "Job": "apportion.measure.plan",
    "Rollouts": "apportion.rollouts",
    "Segments": "apportion.credit.record",
    "Verdict": "apportion.verify",
    "grade": "apportion.verify",
    "group_stats": "apportion.groups",
    "grpo_base": "apportion.groups",
    "make_method": "apportion.credit.registry",
    "method_names": "apportion.credit.registry",
}

__all__ = [
    "Base",
    "Continuations",
    "Credit",
    "CreditMethod",
    "Evidence",
    "GroupStats",
    "InputError",
    "Job",
    "Rollouts",
    "Segments",
    "Verdict",
    "__version__",
    "grade",
    "group_stats",
    "grpo_base",
    "make_method",
    "method_names",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("apportion")
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
