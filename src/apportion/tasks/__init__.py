"""Prompts and data sets: the embedded task with its policy, and the user's own problems.

Importing this package loads neither torch nor transformers.
"""

from apportion.tasks.arithmetic import (
    ALPHABET,
    CORRECTION,
    STEP_DELIMITER,
    ArithmeticTask,
    Problem,
    Split,
    check_steps,
    generate,
    parse_problem,
    split_of,
    verify,
)
from apportion.tasks.embedded import load_policy, policy_path
from apportion.tasks.problems import load_problems

TASKS = {"chain": ArithmeticTask}
"""Embedded tasks: name → settings class."""

__all__ = [
    "ALPHABET",
    "CORRECTION",
    "STEP_DELIMITER",
    "TASKS",
    "ArithmeticTask",
    "Problem",
    "Split",
    "check_steps",
    "generate",
    "load_policy",
    "load_problems",
    "parse_problem",
    "policy_path",
    "split_of",
    "verify",
]
