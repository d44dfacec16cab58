"""Lean proofs: what is given to Lean, what its messages say about steps, and processes that misbehave.

`lean_outputs/` was written by hand in the form of `lean --json`; no Lean was run. Lines and columns there are counted
on `GIVEN` below. Stand-ins for Lean are shell scripts that run in the sandbox.

Planted faults seen caught here. Steps: deeper lines or lines that go on taken for steps; columns not kept; offsets of
the fence or the thinking lost; Unicode line breaks counted; the first block taken. Messages: unsolved goals on the
first step and other early ones on the last; the line below the proof not looked at, or all of it; one error only;
warnings as errors; sorry or any axiom allowed, Choice not; sorry's warning ignored, the row's own counted; sorry found
inside of names, or where all is proved. Abstaining: a missing end, a time-out, garbage or a broken statement taken for
a proof or a failure; the statement not tried, tried each time, its time-out kept. Refusals: another statement, text in
front of it, forbidden words, comments that do not nest let through. Processes: everything or too little readable, the
environment leaking, memory, wall or tier ignored, elan's proxy run, the flag not needed. Quadratic reading.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.errors import InputError
from apportion.verify.lean import FORBIDDEN, LeanVerifier, _blank_comments, read_messages
from apportion.verify.sandbox import Limits, LocalSandbox, SandboxError, StdinJob, StdinReport
from apportion.verify.sandbox import StdinResult as Result

OUTPUTS = Path(__file__).parent / "lean_outputs"
THEOREM = "theorem add_zero_of (a b : ℕ) (h : a = b) : b + 0 = a :="
ROW = {"formal_statement": f"{THEOREM} by sorry"}
TACTICS = """ by
  -- first, the zero goes; import nothing
  have h0 : b + 0 = b := by
    simp
  rw [h0]
  exact h.symm
"""
RESPONSE = f"Let me prove it. 🙂\n```lean4\n{THEOREM}{TACTICS}```\nDone."
STEPS = [RESPONSE.index("have h0"), RESPONSE.index("rw [h0]"), RESPONSE.index("exact h.symm")]
# Line 1 the header, 2 the statement, 3 to 8 the proof, 9 its last line break, 10 the question after the axioms.
GIVEN = f"""import Mathlib
{THEOREM}
{" " * 56} by
{" " * len("  -- first, the zero goes; import nothing")}
  have h0 : b + 0 = b := by
    simp
  rw [h0]
  exact h.symm

#print axioms add_zero_of
"""


class Recorded:
    """A sandbox that answers with recorded outputs, or results, in turn, and keeps what it was given."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.given, self.limits = list(answers), [], []

    def stdin(self, job: StdinJob, limits: Limits) -> StdinReport:
        self.given.append(job.inputs[0])
        self.limits.append(limits)
        answer = self.answers.pop(0)
        if isinstance(answer, SandboxError):
            raise answer
        output = answer if isinstance(answer, Result) else Result((OUTPUTS / f"{answer}.jsonl").read_text("utf-8"))
        return StdinReport((output,))


def judge(response: str, *answers: Any, row: dict[str, str] = ROW, header: str = "import Mathlib\n"):
    sandbox = Recorded(*answers)
    verdict = LeanVerifier(header=header, sandbox=sandbox).judge(response, row)
    assert not sandbox.answers, "fewer runs than expected"
    return verdict, sandbox.given


def said(line: int, column: int, data: str = "x", severity: str = "error") -> Result:
    """One message."""
    return Result(json.dumps({"severity": severity, "pos": {"line": line, "column": column}, "data": data}))


def states(verdict) -> list[bool]:
    return [ok for _, ok in verdict.steps]


def test_what_lean_is_given() -> None:
    sandbox = Recorded("proved")
    verifier = LeanVerifier(header="import Mathlib", wall_s=7, memory_mb=9000, sandbox=sandbox, workers=2)
    verdict = verifier.judge(RESPONSE, ROW)
    assert verdict.steps == [(start, True) for start in STEPS] and verdict.reason == ""
    assert sandbox.given == [GIVEN] and sandbox.limits == [Limits(7, 9000, processes=128)]


FALLS = [
    ("proved", [True, True, True], ""),
    ("proved_without_axioms", [True, True, True], ""),
    ("tactic_error", [True, False, True], "tactic 'rewrite' failed"),
    # The first error is inside of the have's own block.
    ("two_errors", [False, True, False], "simp made no progress"),
    # Each tactic went through, and something is left to prove: the last one did not end it.
    ("unsolved_goals", [True, True, False], "unsolved goals"),
    # Reported at the start of the line below the proof; the missing constant there is no step's fault.
    ("cut_off", [True, True, False], "unexpected token"),
    # sorryAx without a sorry that is written out; its warning in spite of a last line in order, or of none.
    ("sorry", [False, True, True], "it rests on sorryAx"),
    ("sorry_masked", [False, True, True], "it rests on sorryAx"),
    ("sorry_without_end", [False, True, True], "it rests on sorryAx"),
    ("compiler_trusted", [False, True, True], "it rests on Lean.ofReduceBool"),
]


@pytest.mark.parametrize(("output", "ok", "reason"), FALLS)
def test_messages_fall_to_steps(output: str, ok: list[bool], reason: str) -> None:
    verdict, _ = judge(RESPONSE, output)
    assert verdict.steps == list(zip(STEPS, ok, strict=True)) and verdict.reason.startswith(reason)


@pytest.mark.parametrize("word", ["sorry", "admit", "exact (sorry : b = a)"])
def test_sorry_fails_its_step(word: str) -> None:
    response = RESPONSE.replace("rw [h0]", word)
    assert states(judge(response, "sorry")[0]) == [True, False, True]
    # Beside an error elsewhere, too: Lean is silent on a sorry then.
    assert states(judge(response, "two_errors")[0]) == [False, False, False]
    # The word alone is nothing where the axioms are in order, nor is a name that holds it.
    assert states(judge(response, "proved")[0]) == [True, True, True]
    named = RESPONSE.replace("rw [h0]", "rw [sorry_free, h.admit]")
    assert states(judge(named, "two_errors")[0]) == [False, True, False]


def test_an_error_above_the_proof_is_the_rows_or_the_first_steps() -> None:
    # The library is missing: so it is without the proof. What Lean says of the proof then means nothing.
    verdict, ran = judge(RESPONSE, "missing_library", "missing_library")
    assert verdict.steps is None and "the statement itself: unknown module prefix" in verdict.reason
    assert ran[1] == f"import Mathlib\n{THEOREM}\nby sorry\n#print axioms add_zero_of\n"
    # Too much work is reported at the theorem; the statement alone is fine.
    verdict, _ = judge(RESPONSE, "heartbeats", "statement_alone")
    assert verdict.steps == list(zip(STEPS, [False, True, True], strict=True))
    # Whether the statement stands could not be found out.
    for unknown in (Result("", "timed out"), "ended_early"):
        assert judge(RESPONSE, "heartbeats", unknown)[0].steps is None


def test_the_statement_is_tried_once() -> None:
    def twice(*answers: Any) -> list[Any]:
        verifier = LeanVerifier(header="import Mathlib", sandbox=Recorded(*answers))
        return verifier(["", ""], [RESPONSE, RESPONSE], [ROW, ROW])

    verdict = list(zip(STEPS, [False, True, True], strict=True))
    assert twice("heartbeats", "statement_alone", "heartbeats") == [verdict, verdict]
    # A time-out is no answer to keep.
    assert twice("heartbeats", Result("", "timed out"), "heartbeats", "statement_alone") == [None, verdict]


SILENT = [
    (Result("", "timed out"), "timed out"), (Result("", "too much output"), "too much output"),
    (SandboxError("upload failed"), "upload failed"), (Result(""), "the end of the file"),
    ("ended_early", "the end of the file"), ("no_constant", "the end of the file"),
    *((Result(text), "not that of lean") for text in ("Stack overflow.", '{"severity":"error"}', "[]", "[" * 100_000)),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "reason"), SILENT)
def test_what_says_nothing_about_the_proof_is_no_verdict(answer: Any, reason: str) -> None:
    verdict, _ = judge(RESPONSE, answer)
    assert verdict.steps is None and reason in verdict.reason


def test_read_messages() -> None:
    messages = read_messages((OUTPUTS / "two_errors.jsonl").read_text("utf-8"))
    assert [(m.severity, m.line, m.column) for m in messages[1:]] == [("error", 8, 8), ("information", 10, 0)]
    assert messages[0].data == "simp made no progress"
    assert read_messages(said(1e999, 0).output) is None


PLACES = [
    f"{THEOREM}{TACTICS}", f"<think>```lean\nby simp\n```</think>\n```lean\n{THEOREM}{TACTICS}",
    f"```lean\nexample := 1\n```\n```Lean4 title\n{THEOREM}{TACTICS}```",
    f"```lean\nimport Mathlib\n\n{THEOREM}{TACTICS}```", f"```lean\n:={TACTICS}```", f"```lean\n{TACTICS[1:]}```",
    f"```lean\n/-- One. -/ {THEOREM.replace(' ', '  ').replace('(h', '-- x' + chr(10) + '(h')}{TACTICS}```",
]  # fmt: skip


@pytest.mark.parametrize("response", PLACES)
def test_where_a_proof_may_stand(response: str) -> None:
    verdict, ran = judge(response, "proved")
    assert verdict.steps == [(response.rindex(text), True) for text in ("have h0", "rw [h0]", "exact h.symm")]
    # The statement is the row's, whatever the response's looks like.
    assert ran[0].startswith(f"import Mathlib\n{THEOREM}\n") and ran[0].split("\n")[2].strip() == "by"


def test_a_proof_that_starts_with_its_first_tactic() -> None:
    verdict, ran = judge("```lean\n  have h0 := 1\n  rw [h0]\n```", said(3, 1, "unsolved goals\nx"))
    assert ran[0].startswith(f"import Mathlib\n{THEOREM}\n by\n  have h0 := 1\n  rw [h0]\n")
    assert verdict.steps == [(10, True), (25, False)]


def test_a_sorry_in_the_rows_own_source_is_not_the_proofs() -> None:
    row = {"formal_statement": f"lemma aux : True := sorry\n@[simp]\n{THEOREM} by\n  sorry"}
    proved = said(6, 0, "'x' does not depend on any axioms", "information").output
    for line, ok in ((2, True), (3, False), (4, False)):
        warning = said(line, 0, "declaration uses 'sorry'", "warning").output
        assert states(judge(":= h.symm", Result(f"{warning}\n{proved}\n"), row=row)[0]) == [ok]


def test_a_tactic_beside_by_and_a_term_are_one_step() -> None:
    verdict, ran = judge(f"{THEOREM} by linarith\n", said(3, 60))
    assert ran[0].split("\n")[2] == " " * 57 + "by linarith" and verdict.steps == [(60, False)]
    for proof in ("h.symm", "by\n"):
        assert judge(f"{THEOREM} {proof}", said(3, 60))[0].steps == [(57, False)]


def test_only_line_feeds_end_lines() -> None:
    # To Lean, the separator in the first tactic is a character like others: line 5 is the second one's.
    response = f"{THEOREM} by\n  exact '\U0001d54f\u2028' ; rfl\n  rfl"
    assert states(judge(response, said(5, 2))[0]) == [True, False]
    # Line 3 is in front of the first.
    assert states(judge(response, said(3, 57))[0]) == [False, True]


def test_lines_that_go_on_with_a_step() -> None:
    text = f"""{THEOREM} by
  induction a with
  | zero => simp
  | succ n =>
    simp
  <;> ring
  exact ⟨h,
    h
  ⟩
  if h : a = b then rfl
  else rfl

  · simp
 -- a remark
  rfl
"""
    starts = [text.rindex(part) for part in ("induction", "exact", "if h", "· simp", "rfl")]
    assert judge(text, said(7, 4))[0].steps == [(start, k != 0) for k, start in enumerate(starts)]


CHANGED = [
    THEOREM.replace("b + 0 = a", "b + 0 = b"), THEOREM.replace("(h : a = b) ", ""), "example : 1 = 1 :=",
    THEOREM.replace("add_zero_of", "mine"), THEOREM.replace("theorem", "lemma"), f"variable (x : ℕ)\n{THEOREM}",
    f"theorem aux : True := trivial\n{THEOREM}", f"import Mathlib\nimport Aesop\n{THEOREM}",
    THEOREM.replace(" :=", " ∨ True :="), THEOREM.replace("(h", "/- (h").replace("b) ", "b) -/ "),
]  # fmt: skip


@pytest.mark.parametrize("theorem", CHANGED)
def test_another_statement_is_refused_and_not_run(theorem: str) -> None:
    response = f"```lean\n{theorem}{TACTICS}```"
    verdict, ran = judge(response)
    assert not ran and "something other than add_zero_of" in verdict.reason
    assert verdict.steps and not any(states(verdict))
    starts = [response.index(text) for text in ("have", "rw", "exact")]
    assert "trivial" in theorem or [start for start, _ in verdict.steps] == starts


@pytest.mark.parametrize("response", ["", "<think> I do not know", "```lean\n-- nothing\n```", "```lean\n```"])
def test_no_proof_has_no_steps(response: str) -> None:
    verdict, ran = judge(response)
    assert verdict.steps == [] and verdict.reason == "no proof found" and not ran


HOSTILE = [
    "#eval IO.println 1", "run_tac do pure ()", "exact by_elab return .const ``x []", "native_decide",
    "decide +native", "decide (config := { native := true })", "set_option debug.skipKernelTC true in rfl",
    "bv_decide", "rfl\naxiom cheat : False", "rfl\nmacro \"x\" : tactic => x", "exact include_str \"/x\"",
    "exact _root_.IO.x", "exact «IO».x", "rfl\nopen Lean Elab", "rfl\nunsafe def x := 1", "rfl\n#exit",
    "exact ofReduceBool a b h", "polyrith", "rfl\ninitialize x : Nat ← pure 1", "/- a -/#eval 1",
    "rfl\nimport Mathlib", "rfl /- a /- -/ -/ #eval 1", "sorry\nnamespace Nat",
    "sorry\ntheorem Nat.mine : True := trivial", "rfl\nlocal notation \"x\" => y", "exact BaseIO.toIO",
]  # fmt: skip
HARMLESS = [
    "rfl -- import, IO and #eval", "rfl /- macro /- unsafe -/ axiom -/", "open Nat in rfl",
    "exact List.prefix_append io lean", "simp [my_axiom, importance, h.set]", "infer_instance", "#check h",
    "exact h.prefix", "rfl\nend Foo", "exact Set.def _",
]  # fmt: skip


@pytest.mark.parametrize("tactic", HOSTILE)
def test_programs_in_proofs_are_refused_and_not_run(tactic: str) -> None:
    verdict, ran = judge(f"{THEOREM} by\n  simp\n  {tactic}")
    assert not ran and verdict.reason.startswith("forbidden in a proof: ")
    assert verdict.steps and not any(states(verdict))


@pytest.mark.parametrize("tactic", HARMLESS)
def test_words_that_run_nothing_are_let_through(tactic: str) -> None:
    _, ran = judge(f"{THEOREM} by\n  {tactic}", Result(""))
    assert len(ran) == 1 and not FORBIDDEN.search(ran[0].partition(THEOREM)[2])


def slow_blanking(code: str) -> str:
    """Lean's comments, one character at a time; an open one at the end is left as it is."""
    out, at = "", 0
    while at < len(code):
        begin, depth = at, int(code[at : at + 2] == "/-")
        if code[at : at + 2] == "--":
            while at < len(code) and code[at] != "\n":
                at += 1
        elif depth:
            at += 2
            while depth and at < len(code):
                mark = code[at : at + 2]
                depth += (mark == "/-") - (mark == "-/")
                at += 2 if mark in ("/-", "-/") else 1
            if depth:
                return out + code[begin:]
        else:
            out, at = out + code[at], at + 1
            continue
        out += "".join("\n" if c == "\n" else " " for c in code[begin:at])
    return out


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="/-/-a \n", max_size=30))
def test_comments_are_blanked_in_place(code: str) -> None:
    assert _blank_comments(code) == slow_blanking(code)


BELOW = st.lists(st.sampled_from(["    simp", "", "  -- simp", "   ring", "  <;> simp", "  | x"]), max_size=3)
TACTIC = st.tuples(st.sampled_from(["simp", "have : a := by", "· rfl"]), BELOW)


@settings(max_examples=100, deadline=None)
@given(st.lists(TACTIC, min_size=1), st.data())
def test_every_line_at_the_blocks_indentation_is_a_step(
    tactics: list[tuple[str, list[str]]], data: st.DataObject
) -> None:
    """Tactics with deeper lines, blank ones and remarks under each: where they start is known from how it is built."""
    text, starts = f"{THEOREM} by\n", []
    for tactic, below in tactics:
        starts.append(len(text) + 2)
        text += "\n".join([f"  {tactic}", *below, ""])
    # An error on a line of a step is that step's.
    bad = data.draw(st.integers(0, len(starts) - 1))
    verdict, _ = judge(text, said(3 + text.count("\n", 0, starts[bad]), 3))
    assert verdict.steps == [(start, k != bad) for k, start in enumerate(starts)]


@pytest.mark.parametrize("given_text", ["def f := 1", "", "example : 1 = 1 := by sorry", "-- theorem x : 1 = 1 :="])
def test_a_row_without_a_theorem_is_named(given_text: str) -> None:
    with pytest.raises(InputError, match=r"formal_statement: got .*; expected Lean source that ends in `theorem NAME"):
        judge(RESPONSE, row={"formal_statement": given_text})
    with pytest.raises(InputError, match=r"theorem: got NoneType.*statement_column="):
        LeanVerifier(sandbox=Recorded(), statement_column="theorem")([""], [RESPONSE], [ROW])


READ = [
    ("/-- One. -/\n@[simp] lemma Nat.foo.{u} {x : ℕ} : x = x", "Nat.foo"),
    ("import Mathlib\nlemma aux : True := trivial\nprivate theorem t₁' : True := by\n  sorry -- here", "t₁'"),
    ("theorem a: True\n  := sorry", "a"),
]


@pytest.mark.parametrize(("statement", "name"), READ)
def test_statements_are_read(statement: str, name: str) -> None:
    _, ran = judge(":= by rfl", Result(""), row={"formal_statement": statement}, header="")
    assert ran[0].endswith(f"#print axioms {name}\n") and "sorry" not in ran[0]


LONG = [
    "/-" * 50_000, "-" * 100_000, "```lean\n" * 20_000, " " * 100_000 + "\n" * 50_000, "theorem " * 20_000,
    THEOREM[:-2] * 3_000, "by\n" + "  simp\n" * 20_000, "\n" * 100_000 + "x", f"{THEOREM} by\n" + " \n" * 50_000 + "x",
    "/- -/" * 20_000 + "x", "theorem" + " " * 100_000, ":=" * 50_000, "sorry " * 20_000,
]  # fmt: skip


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_hostile_text_takes_linear_time(text: str) -> None:
    """A bound that reading in quadratic time would exceed by far, on any machine."""
    began = time.process_time()
    steps = LeanVerifier(sandbox=Recorded(said(3, 0)), header="import Mathlib").judge(text, ROW).steps
    assert not all(ok for _, ok in steps) or not steps
    assert time.process_time() - began < 5


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that `nobody` may read, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


def stand_in(folder: Path, script: str, prefix: str = "exit 1") -> str:
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = folder / "lean"
    path.write_text(f'#!/bin/sh\n[ "$1" = --print-prefix ] && {prefix}\n{script}\n')
    path.chmod(0o755)
    return str(path)


def say(folder: Path, name: str) -> str:
    """Shell that prints a recorded output with nothing but builtins."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    copy = folder / f"{name}.jsonl"
    copy.write_text((OUTPUTS / copy.name).read_text("utf-8"), "utf-8")
    copy.chmod(0o644)
    return f"while IFS= read -r line; do printf '%s\\n' \"$line\"; done < {copy}"


def run(binary: str, **changed: Any):
    limits = {"wall_s": 20, "memory_mb": 512, "allow_local_code": True, "header": "import Mathlib", **changed}
    return LeanVerifier(binary, **limits).judge(RESPONSE, ROW)


def test_the_process_gets_the_file_and_nothing_else(folder: Path) -> None:
    checks = f"""
[ "$*" = "--json -j1 Proof.lean" ] && [ "$LEAN_PATH" = {folder} ] && [ -z "$HOME$USER$SECRET" ] || exit 3
wanted=$(while IFS= read -r line; do printf '%s|' "$line"; done < {folder}/wanted)
got=$(while IFS= read -r line; do printf '%s|' "$line"; done < Proof.lean)
[ "$wanted" = "$got" ] || exit 4
echo noise >&2
"""
    (folder / "wanted").write_text(GIVEN, "utf-8")
    (folder / "wanted").chmod(0o644)
    verdict = run(stand_in(folder, checks + say(folder, "proved")), paths=[str(folder)])
    assert verdict.steps == [(start, True) for start in STEPS], verdict.reason


def test_messages_count_whatever_the_exit_status(folder: Path) -> None:
    assert states(run(stand_in(folder, say(folder, "tactic_error") + "\nexit 1"))) == [True, False, True]
    assert "the end of the file" in run(stand_in(folder, "exit 1")).reason
    assert "not that of lean" in run(stand_in(folder, "echo 'unknown option: --json'; exit 1")).reason


def processes_of(folder: Path) -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return [command for command in found if str(folder).encode() in command and b"pytest" not in command]


def test_a_time_out_ends_the_whole_group(folder: Path) -> None:
    script = '(trap "" TERM HUP; while :; do :; done) &\nwhile :; do :; done'
    verdict = run(stand_in(folder, script), wall_s=1)
    assert verdict.steps is None and verdict.reason == "timed out" and not processes_of(folder)


def test_output_and_memory_are_bounded(folder: Path) -> None:
    verdict = run(stand_in(folder, "while :; do echo 0123456789012345678901234567890123456789; done"))
    assert verdict.steps is None and verdict.reason == "too much output"
    grows = 'a=0123456789abcdef\nwhile [ ${#a} -lt 100000000 ]; do a="$a$a"; done\n' + say(folder, "proved")
    assert run(stand_in(folder, grows), memory_mb=1024).steps is not None
    assert "the end of the file" in run(stand_in(folder, grows), memory_mb=128).reason


@pytest.mark.skipif(LocalSandbox().tier() != "fenced", reason="this machine's kernel fences no files")
def test_only_the_toolchain_is_within_reach(folder: Path) -> None:
    script = "(read -r x < /etc/passwd) 2>/dev/null && exit 3\n"
    assert run(stand_in(folder / "bin", script + say(folder / "bin", "proved"))).steps is not None
    outside = say(folder, "proved")
    assert run(stand_in(folder / "bin", script + outside)).steps is None
    assert run(stand_in(folder / "bin", script + outside), paths=[str(folder)]).steps is not None


def test_the_toolchain_behind_a_proxy_is_found(folder: Path) -> None:
    stand_in(folder / "toolchain" / "bin", say(folder / "toolchain", "proved"))
    proxy = stand_in(folder / "elan", "exit 1", prefix=f"exec echo {folder}/toolchain")
    assert run(proxy).steps is not None


def test_a_tier_out_of_reach_is_no_verdict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apportion.verify.sandbox._Jail.entered", lambda jail: "process")
    verdict = run(stand_in(folder, "exit 1"), require="fenced")
    assert verdict.steps is None and "'fenced' was required" in verdict.reason


def test_running_lean_needs_the_flag_and_a_binary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("APPORTION_ALLOW_LOCAL_CODE", raising=False)
    with pytest.raises(InputError, match=r"allow_local_code: got False; expected True.*APPORTION_ALLOW_LOCAL_CODE=1"):
        LeanVerifier(stand_in(folder, "exit 1"))
    monkeypatch.setenv("PATH", str(folder / "empty"))
    with pytest.raises(InputError, match=r"binary: got None; expected a `lean` executable.*elan"):
        LeanVerifier(allow_local_code=True)
    monkeypatch.setenv("APPORTION_ALLOW_LOCAL_CODE", "1")
    with pytest.raises(InputError, match=r"binary: got '/no/lean'"):
        LeanVerifier("/no/lean")
    with pytest.raises(InputError, match=r"paths: got /no/library; expected folders that are there"):
        LeanVerifier(stand_in(folder, "exit 1"), paths=["/no/library"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's Lean runs as somebody else")
def test_a_toolchain_that_nobody_may_read_is_named(folder: Path) -> None:
    binary = stand_in(folder, "exit 1")
    folder.chmod(0o700)
    with pytest.raises(InputError, match=r"binary: .*expected files that every user may read"):
        LeanVerifier(binary, allow_local_code=True)
