"""Whole Lean proofs as a kind of verifier: what is right, wrong and no verdict, and what must never be right.

Messages are those of `lean_outputs/`, written by hand in the form of `lean --json`; no Lean was run.

Planted faults seen caught here: a failed step or a written sorry called right; a hanging proof that abstains; a lost
sandbox, or a statement that fails by itself, called wrong; the flag or the binary not needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_verify_lean import FALLS, GIVEN, RESPONSE, THEOREM, Recorded, Result, folder, judge, said, say, stand_in

from apportion.errors import InputError
from apportion.verify import check_gold, grade, grade_many
from apportion.verify.proofs import LeanSettings
from apportion.verify.rewards import combine, verifier_reward
from apportion.verify.sandbox import SandboxError

__all__ = ["folder"]
GOLD = f"{THEOREM} by sorry"
LATE, LOUD, SILENT = Result("", "timed out"), Result("", "too much output"), Result("")


def prove(response: str, *answers: Any, gold: Any = GOLD):
    sandbox = Recorded(*answers)
    verdict = grade("lean", gold, response, header="import Mathlib\n", sandbox=sandbox)
    assert not sandbox.answers, "fewer runs than expected"
    return verdict


def test_a_proof_and_what_was_compared() -> None:
    sandbox = Recorded("proved")
    verdict = grade("lean", GOLD, RESPONSE, header="import Mathlib", wall_s=7, memory_mb=9000, sandbox=sandbox)
    assert (verdict.outcome, verdict.reason, verdict.gold) == ("correct", "proved", THEOREM[:-3])
    assert verdict.prediction and "exact h.symm" in verdict.prediction
    assert sandbox.given == [GIVEN] and sandbox.limits[0].wall_s == 7 and sandbox.limits[0].memory_mb == 9000


@pytest.mark.parametrize(("output", "ok", "reason"), FALLS)
def test_a_proof_is_right_where_no_step_failed(output: str, ok: list[bool], reason: str) -> None:
    verdict = prove(RESPONSE, output)
    assert verdict.outcome == ("correct" if all(ok) else "wrong") and (all(ok) or verdict.reason.startswith(reason))


# Beside messages that would make the proof right, as if a macro had forged them.
NEVER = [
    "sorry", "admit", "exact sorryAx _", "exact (sorry : b = a)", "native_decide", "decide +native",
    "decide (config := { «native» := true })", "rfl\naxiom cheat : False", "rfl\nunsafe def x := 1", "exact by_elab x",
    'rfl\nelab "x" : tactic => pure ()', 'rfl\nmacro "x" : tactic => `(tactic| rfl)', "run_tac pure ()",
    "rfl\n#eval IO.println 1", "rfl\n#exit", "rfl\n#guard_msgs (drop info) in", 'rfl\nnotation3 "x" => 1',
    'rfl\nbinder_predicate x " y " z:term => `(z)', "set_option debug.skipKernelTC true in rfl",
    "rfl\nregister_option x : Nat := {}", "rfl\nopen Lean Elab Tactic in", "exact include_str \"/x\"",
    "rfl\nattribute [instance] x", "rfl\ninitialize x : Nat ← pure 1", "rfl\n@[implemented_by x] opaque y : Nat",
]  # fmt: skip


@pytest.mark.parametrize("tactic", NEVER)
def test_what_can_never_be_right(tactic: str) -> None:
    sandbox = Recorded("proved")
    verdict = grade("lean", GOLD, RESPONSE.replace("rw [h0]", tactic), header="import Mathlib", sandbox=sandbox)
    assert verdict.outcome == "wrong"
    assert verdict.reason.startswith(("forbidden in a proof: ", "sorry is written"))


def test_names_that_hold_sorry_are_no_sorry() -> None:
    assert prove(RESPONSE.replace("rw [h0]", "rw [sorry_free, h.admit] -- sorry"), "proved").outcome == "correct"


@pytest.mark.parametrize("response", ["", "<think> I do not know", "```lean\n-- nothing\n```"])
def test_no_proof_is_wrong_and_not_run(response: str) -> None:
    assert (prove(response).outcome, prove(response).reason) == ("wrong", "no proof found")


def test_another_statement_is_wrong_and_not_run() -> None:
    assert prove(RESPONSE.replace("b + 0 = a", "b = b")).outcome == "wrong"


@pytest.mark.parametrize("answer", [LATE, LOUD, SILENT, Result("Stack overflow detected."), "ended_early"])
def test_a_proof_that_breaks_lean_is_wrong_where_the_statement_alone_does_not(answer: Any) -> None:
    assert prove(RESPONSE, answer, "statement_alone").outcome == "wrong"
    for unknown in (LATE, SandboxError("lost"), "missing_library", "ended_early"):
        assert prove(RESPONSE, answer, unknown).outcome == "abstain"


def test_a_lost_sandbox_or_a_broken_statement_abstains() -> None:
    verdict = prove(RESPONSE, SandboxError("upload failed"))
    assert (verdict.outcome, verdict.reason) == ("abstain", "sandbox: upload failed")
    # The statement was tried for the errors above the proof already, and fails as well.
    assert prove(RESPONSE, "missing_library", "missing_library").outcome == "abstain"
    assert prove(RESPONSE, "heartbeats", "statement_alone").outcome == "wrong"


def test_what_never_closes_fails_the_last_step() -> None:
    """Lean reports it at the end of the file: below the line that asks for the axioms, which it swallows."""
    response = f"{THEOREM} by\n  simp\n  rfl /- and so"
    # 1 the header, 2 the statement, 3 to 5 the proof, 6 the question, 7 the end.
    verdict, _ = judge(response, said(7, 0, "unterminated comment"))
    assert verdict.steps and [ok for _, ok in verdict.steps] == [True, False]
    assert prove(response, said(7, 0, "unterminated comment")).outcome == "wrong"


@pytest.mark.parametrize("gold", [None, "", "no theorem", 4, [GOLD], {"formal_statement": GOLD}, "def x := 1"])
def test_golds_that_are_no_theorem(gold: Any) -> None:
    assert prove(RESPONSE, gold=gold).outcome == "abstain"
    assert check_gold("lean", gold) is not None and check_gold("lean", GOLD) is None


def test_nothing_runs_without_the_flag_or_a_binary(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("APPORTION_ALLOW_LOCAL_CODE", raising=False)
    off = grade("lean", GOLD, RESPONSE)
    assert off.outcome == "abstain" and "APPORTION_ALLOW_LOCAL_CODE=1" in off.reason
    monkeypatch.setenv("PATH", str(folder))
    absent = grade("lean", GOLD, RESPONSE, allow_local_code=True)
    assert absent.outcome == "abstain" and "elan" in absent.reason
    with pytest.raises(InputError, match="require: got 'fence'"):
        grade("lean", GOLD, RESPONSE, require="fence")


def test_as_a_reward_here_and_for_many() -> None:
    sandbox = Recorded("proved", SandboxError("lost"), "tactic_error")
    reward = combine([verifier_reward("lean", "formal_statement", header="import Mathlib", sandbox=sandbox)])
    columns = {"formal_statement": [GOLD]}
    assert [reward(completions=[RESPONSE], **columns)[0] for _ in range(3)] == [1.0, None, 0.0]
    items = [{"kind": "lean", "gold": GOLD, "prediction": RESPONSE}]
    assert grade_many(items, {"lean": {"sandbox": Recorded("proved"), "header": "import Mathlib"}})[0].reward == 1.0


def test_settings_reach_the_process(folder: Path) -> None:
    """A stand-in for Lean, in the local sandbox."""
    checks = f'[ "$*" = "--json -j1 Proof.lean" ] && [ "$LEAN_PATH" = {folder} ] || exit 3\n'
    settings = LeanSettings(
        header="import Mathlib", binary=stand_in(folder, checks + say(folder, "proved")), lean_path=str(folder),
        allow_local_code=True, wall_s=20, memory_mb=512,
    )  # fmt: skip
    assert settings.verifier is settings.verifier
    given = {field: getattr(settings, field) for field in settings.__dataclass_fields__}
    assert grade("lean", GOLD, RESPONSE, **given).outcome == "correct"
    assert json.loads((folder / "proved.jsonl").read_text().splitlines()[-1])["severity"] == "information"
