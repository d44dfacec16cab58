"""Whole Lean proofs: the kind "lean" of verifier. The rules are at the top of `lean`.

The gold is the theorem to prove: Lean source that ends in `theorem NAME ... :=`, with or without a `sorry`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from apportion.errors import InputError
from apportion.verify.lean import LeanVerifier, read_statement
from apportion.verify.sandbox import Sandbox, Tier
from apportion.verify.verdict import Verdict


@dataclass(frozen=True)
class LeanSettings:
    """How whole proofs are judged. [ours]

    Attributes:
        header: Lean source in front of every statement: imports, `open`, options.
        binary: the `lean` executable. With a `sandbox`: its path there.
        lean_path: folders of compiled libraries, with colons between them, as in LEAN_PATH.
        allow_local_code: run Lean on this machine, in `LocalSandbox`. Off, there is no verdict without a `sandbox`.
            The environment variable APPORTION_ALLOW_LOCAL_CODE=1 is the same flag.
        sandbox: who runs it instead (a remote client).
        require: the least tier of local isolation (see `sandbox`).
        wall_s: seconds for one proof.
        memory_mb: address space of Lean, MiB.
    """

    header: str = ""
    binary: str = "lean"
    lean_path: str = ""
    allow_local_code: bool = False
    sandbox: Sandbox | None = None
    require: Tier = "process"
    wall_s: float = 60.0
    memory_mb: int = 4096

    def __post_init__(self) -> None:
        if self.require not in get_args(Tier):
            raise InputError("require", repr(self.require), f"one of {', '.join(get_args(Tier))}")

    @cached_property
    def verifier(self) -> LeanVerifier:
        """Raises InputError where Lean cannot be run under these settings (see `LeanVerifier`)."""
        try:
            return LeanVerifier(
                self.binary, self.header, self.wall_s, self.memory_mb, self.allow_local_code, self.sandbox,
                self.require, [path for path in self.lean_path.split(os.pathsep) if path],
                workers=len(os.sched_getaffinity(0)),
            )  # fmt: skip
        except InputError as error:
            field = "lean_path" if error.field == "paths" else error.field
            raise InputError(field, error.got, error.expected, error.fix) from None


def unreadable_gold(gold: object, settings: LeanSettings) -> str | None:
    """Why a gold is no theorem to prove; None if it is."""
    if not isinstance(gold, str):
        return f"the gold is {type(gold).__name__}; accepted is Lean source that ends in a theorem"
    try:
        read_statement(gold, settings.header, "gold")
    except InputError as error:
        return f"the gold is {error.got}; accepted is {error.expected}"
    return None


def grade(gold: object, prediction: str, settings: LeanSettings) -> Verdict:
    """Correct when the response proves the gold. Abstains on a gold that is no theorem, where nobody may or can run
    Lean, and where the sandbox or the statement itself fails."""
    if reason := unreadable_gold(gold, settings):
        return Verdict("abstain", reason)
    try:
        verifier = settings.verifier
    except InputError as error:
        return Verdict("abstain", str(error), str(gold))
    return verifier.prove(str(gold), prediction)
