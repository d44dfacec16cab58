"""TRL's GRPO trainer with per-token credit.

    from apportion.train import CreditConfig, CreditTrainer

Importing this package loads neither TRL nor transformers; the first use of a name does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apportion.train.config import CreditConfig
    from apportion.train.trainer import CreditTrainer

_HOMES = {"CreditConfig": "apportion.train.config", "CreditTrainer": "apportion.train.trainer"}

__all__ = ["CreditConfig", "CreditTrainer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
