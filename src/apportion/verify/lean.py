"""Lean 4 proofs judged tactic by tactic. [ours]; step-verified credit (arXiv 2606.20068) reads the verdicts.

What is run. The row's statement and the model's proof of it: the header, the statement as the row gives it, `:=`, the
proof, `#print axioms NAME`. Of the response, the last fenced lean block counts, else all of it after `</think>`. It
may hold the whole theorem, whose text up to the proof must be the row's but for white space and comments, or the
proof alone, from `:=`, from `by`, or from the first tactic on. Comments are blanked before anything else, in place:
what is searched for forbidden words is what runs.

Steps. Lines of the `by` block at the indentation of its first tactic; a step reaches to the next one. A line that
starts with `|`, `<;>`, a closing bracket, `else` or `then` goes on with the step before. A proof without a `by` of its
own is one step.

Verdicts. Lean's errors fail the step they start in; "unsolved goals" at the block's own `by` fails the last one, any
other error in front of the first step fails the first one. The proof is right where there is no error and the last
line's axioms are propext, Classical.choice and Quot.sound or fewer. `sorry` and `admit`, which leave a warning and the
axiom sorryAx, fail the steps they are written in; another axiom, or a sorry that is not written out, the first step.
Lean often gives up a block at its first error and says nothing about the tactics behind it: they count as ok here, so
read the first failure, as step-verified credit does. A response whose statement differs or whose proof holds a
forbidden word is not run: all of its steps failed. One without a proof has no steps.

No verdict (None), never a failure, for what says nothing about a step: no start, a time-out, too much output,
output that is not Lean's, an end without an error and without the last line's axioms, and an error in the header or
the statement that is there with `sorry` for the proof as well.

Whole proofs (`prove`). Right where no step failed and no `sorry` is written; wrong where one did, or
there is no proof. Where the steps have no verdict, the statement is tried with `sorry` for the proof: if it stands, in
the same time, then the proof is what broke Lean, and is wrong, since abstaining would reward proofs that hang; else
the verdict is "abstain", as it is where the sandbox failed or nobody may run Lean here.

Output. `lean --json FILE` prints one JSON object a message: `severity` (error, warning, information), `pos` and
`endPos` (`line` from 1, `column` from 0 in code points), `data`, `fileName`, `keepFullRange`, `caption`, and later also
`kind` and `isSilent`. Releases from about 4.9 on print so, as far as known: no Lean was at hand to try it on. An older
one that refuses `--json` gives no verdicts. Only severity, pos and data are read.

Safety. Lean runs programs while it reads a proof, so the proof is as hostile as any program. Words that lead there
are refused (`FORBIDDEN`); that is a hurdle and no sandbox. Lean itself runs in the sandbox for programs, its toolchain
and `paths` readable besides: see `sandbox` for what each tier does not stop. A proof that gets a program past the
list can, inside of the sandbox, print messages of its own and so forge a verdict.
"""

from __future__ import annotations

import bisect
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from apportion.errors import InputError
from apportion.verify.code import ALLOW_VARIABLE
from apportion.verify.extract import after_thinking
from apportion.verify.sandbox import Limits, LocalSandbox, Sandbox, SandboxError, StdinJob, Tier
from apportion.verify.steps import Steps
from apportion.verify.verdict import Verdict

AXIOMS = frozenset({"propext", "Classical.choice", "Quot.sound"})
# What has no place in a proof: namespaces of programs; commands, terms and tactics that declare or run them, read files
# or start others; trust in the compiler; options (one turns the kernel's check off); the end of the file before its
# last line, and what would hide its answer; and declarations or namespaces of the proof's own, which could give that
# line another theorem to look at.
FORBIDDEN = re.compile(
    r"""\b(?:\w*IO|Lean|Lake|System)\b | \#eval | \#exit | \#guard_ | \beval% | \b(?:run_|unsafe|register_)\w*
    | \w*[rR]educeBool
    | trustCompiler | \+\s*native\b | \bnative»?\s*:= | (?<![\w.])(?:by_elab|elab|elab_rules|macro|macro_rules|syntax
    |declare_syntax_cat|simproc|dsimproc|initialize|builtin_initialize|extern|implemented_by|include_str|polyrith
    |native_decide|bv_decide|import|set_option|axiom|opaque|theorem|lemma|def|abbrev|instance|example|structure|class
    |inductive|namespace|section|notation3?|binder_predicate|infix[lr]?|prefix|postfix|attribute|export|alias)\b""",
    re.VERBOSE,
)
_FENCE = re.compile(r"^```[ \t]*lean4?\b[^\n]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_COMMENT, _BLOCK_MARK = re.compile(r"--|/-"), re.compile(r"/-|-/")
_THEOREM = re.compile(
    r"^(?:@\[[^\]]*\]\s*)?(?:(?:private|protected)\s+)?(?:theorem|lemma)\s+([^\s:({\[⦃.]+(?:\.[^\s:({\[⦃.]+)*)",
    re.MULTILINE,
)
_DECLARATION = re.compile(r"^ *(?:theorem|lemma|example|def|abbrev|instance)\b", re.MULTILINE)
_LEFT_OPEN = re.compile(r"\s*:=\s*(?:by\b\s*)?(?:sorry\s*)?\Z")
_CONTINUES = re.compile(r"<;>|[|)\]}⟩]|(?:else|then)\b")
_LINE, _INK, _BY = re.compile(r"^ *(?=\S)", re.MULTILINE), re.compile(r"\S"), re.compile(r"\s*by\b")
_SORRY = re.compile(r"(?<![\w.'])(?:sorry|admit|sorryAx)(?![\w'])")
_UNPROVED = re.compile("declaration uses ['`]sorry['`]")
_DEPENDS = re.compile(r"does not depend on any axioms|depends on axioms:\s*\[([^\]]*)\]")
_PROGRAM = """import os, sys
open("Proof.lean", "wb").write(sys.stdin.buffer.read())
os.execve({binary!r}, [{binary!r}, "--json", "-j1", "Proof.lean"], {environment!r})
"""


@dataclass(frozen=True)
class LeanVerdict:
    """`steps`: (character of the response, whether it is ok), None without a verdict. `reason`: why not proved.
    `proof`: what was given to Lean as the proof. `lost`: the sandbox failed."""

    steps: Steps | None
    reason: str = ""
    proof: str | None = None
    lost: bool = False


@dataclass(frozen=True)
class Message:
    """One message of Lean's; `line` from 1, `column` from 0 in characters."""

    severity: str
    line: int
    column: int
    data: str


@dataclass(frozen=True)
class _Statement:
    """A row's theorem up to its `:=`. `before`: the words in front of it, the header's too. `height`: line breaks in
    the theorem itself."""

    text: str
    name: str
    height: int
    pattern: re.Pattern[str]
    before: tuple[str, ...]


@dataclass(frozen=True)
class _Proof:
    """What Lean is given: `above`, `body` (the model's), `below`. `line`: where the theorem starts, from 1. `steps`:
    characters of the body; `at`: what to add to get those of the response."""

    above: str
    body: str
    below: str
    line: int
    steps: list[int]
    at: int

    def verdict(self, failed: set[int], reason: str) -> LeanVerdict:
        steps = [(start + self.at, k not in failed) for k, start in enumerate(self.steps)]
        return LeanVerdict(steps, reason, self.body)

    def refused(self, reason: str) -> LeanVerdict:
        return self.verdict(set(range(len(self.steps))), reason)


def _blank_comments(code: str) -> str:
    """The code with comments as spaces; one that never closes stays, for Lean to refuse."""
    pieces, at = [], 0
    while mark := _COMMENT.search(code, at):
        end = _comment_end(code, mark)
        if end is None:
            break
        pieces += [code[at : mark.start()], re.sub(r"[^\n]", " ", code[mark.start() : end])]
        at = end
    return "".join(pieces) + code[at:]


def _comment_end(code: str, mark: re.Match[str]) -> int | None:
    if mark[0] == "--":
        end = code.find("\n", mark.end())
        return end if end >= 0 else len(code)
    depth = 1
    for inner in _BLOCK_MARK.finditer(code, mark.end()):
        depth += 1 if inner[0] == "/-" else -1
        if depth == 0:
            return inner.end()
    return None


def read_statement(given: str, header: str, column: str) -> _Statement:
    """A row's theorem. Raises InputError, naming the column, where there is none."""
    text = _LEFT_OPEN.sub("", _blank_comments(given)).strip()
    theorem = max(_THEOREM.finditer(text), key=re.Match.start, default=None)
    if theorem is None:
        raise InputError(column, repr(given)[:60], "Lean source that ends in `theorem NAME ... :=`")
    words = text[theorem.start() :].split()
    pattern = re.compile(r"(?<!\S)" + r"\s++".join(map(re.escape, words)) + r"\s*:=")
    before = (_blank_comments(header) + "\n" + text[: theorem.start()]).split()
    return _Statement(text, theorem[1], text.count("\n", theorem.start()), pattern, tuple(before))


def _steps(text: str) -> list[int]:
    """Where the steps of a proof start."""
    opening = _BY.match(text)
    first = _INK.search(text, opening.end() if opening else 0)
    if first is None:
        return [opening.end() - 2 if opening else 0]
    starts = [first.start()]
    if opening:
        column = first.start() - (text.rfind("\n", 0, first.start()) + 1)
        for line in _LINE.finditer(text, first.end()):
            if len(line[0]) == column and not _CONTINUES.match(text, line.end()):
                starts.append(line.end())
    return starts


def _split(code: str, statement: _Statement) -> tuple[int, bool] | None:
    """Where the proof starts, and whether it starts with its first tactic; None for another statement."""
    if theorem := statement.pattern.search(code):
        before = tuple(code[: theorem.start()].split())
        same = not before or statement.before[-len(before) :] == before
        return (theorem.end(), False) if same else None
    first = _INK.search(code)
    assert first is not None
    if code.startswith(":=", first.start()):
        return first.end() + 1, False
    if _BY.match(code):
        return first.start(), False
    return None if _DECLARATION.search(code) else (0, True)


def _lay_out(header: str, statement: _Statement, body: str, column: int, tactics: bool, at: int) -> _Proof:
    """`column`: of the body's first character in the response; it is kept, since Lean looks at columns."""
    above = f"{header.rstrip()}\n{statement.text} :=\n"
    lead = (" by\n" if tactics else "") + " " * column
    below = f"\n#print axioms {statement.name}\n"
    line = above.count("\n") - statement.height
    return _Proof(above, lead + body, below, line, _steps(lead + body), at - len(lead))


def _read_proof(response: str, header: str, statement: _Statement) -> tuple[_Proof | None, str]:
    """The proof in a response, and why it is refused, if it is."""
    answer = after_thinking(response) or ""
    start = len(response) - len(answer)
    block = max(_FENCE.finditer(answer), key=re.Match.start, default=None)
    code = _blank_comments(block[1] if block else answer)
    start += block.start(1) if block else 0
    if not code.strip():
        return None, "no proof found"
    found = _split(code, statement)
    assigned = code.find(":=")
    body_at, tactics = found or (assigned + 2 if assigned >= 0 else 0, False)
    at = start + body_at
    column = at - (response.rfind("\n", 0, at) + 1)
    proof = _lay_out(header, statement, code[body_at:], column, tactics, at)
    if found is None:
        return proof, f"the response states something other than {statement.name} of the row"
    word = FORBIDDEN.search(proof.body)
    return proof, f"forbidden in a proof: {word[0]}" if word else ""


def read_messages(output: str) -> list[Message] | None:
    """What `lean --json` printed; None if that is not what it prints."""
    try:
        rows = [json.loads(line) for line in output.split("\n") if line.strip()]
        return [Message(r["severity"], int(r["pos"]["line"]), int(r["pos"]["column"]), str(r["data"])) for r in rows]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _judge(proof: _Proof, messages: Sequence[Message]) -> LeanVerdict:
    first_line = proof.above.count("\n") + 1
    last_line = first_line + proof.body.count("\n") + 1
    lines = [0, *(k + 1 for k, character in enumerate(proof.body) if character == "\n")]
    last = len(proof.steps) - 1
    errors = [m for m in messages if m.severity == "error"]
    # A proof that is cut off may be reported where the line below it starts, and a comment or text that never closes
    # at the end of the file; what that line itself gets wrong is no fault of the proof's.
    own = [m for m in errors if m.line >= first_line and (m.line != last_line or m.column == 0)]
    written = {max(bisect.bisect(proof.steps, m.start()) - 1, 0) for m in _SORRY.finditer(proof.body)}
    if own:
        failed = set(written)
        for m in own:
            at = lines[m.line - first_line] + m.column if m.line < last_line else len(proof.body)
            step = bisect.bisect(proof.steps, at) - 1
            failed.add(step if step >= 0 else last if m.data.startswith("unsolved goals") else 0)
        return proof.verdict(failed, own[0].data[:300])
    if above := next((m for m in errors if m.line < first_line), None):
        return proof.verdict({0}, above.data[:300])
    unproved = any(m.severity == "warning" and m.line >= proof.line and _UNPROVED.search(m.data) for m in messages)
    ends = [_DEPENDS.search(m.data) for m in messages if m.line == last_line]
    axioms = next((end for end in ends if end), None)
    if axioms is None and not unproved:
        return LeanVerdict(None, "Lean did not come to the end of the file", proof.body)
    named = {name.strip() for name in ((axioms and axioms[1]) or "").split(",")} - {""}
    others = sorted((named | ({"sorryAx"} if unproved else set())) - AXIOMS)
    if not others:
        return proof.verdict(set(), "")
    failed = written if others == ["sorryAx"] else {0}
    return proof.verdict(failed or {0}, f"it rests on {', '.join(others)}"[:300])


def _is_private(path: str) -> bool:
    """Whether a file or a folder on the way to it is closed to other users."""
    path = os.path.realpath(path)
    while path != "/":
        if os.stat(path).st_mode & 0o005 != 0o005:
            return True
        path = os.path.dirname(path)
    return False


def _toolchain(binary: str | None) -> tuple[str, str]:
    """The executable itself, behind elan's, and the folder that it needs."""
    found = shutil.which(binary or "lean")
    if found is None:
        raise InputError(
            "binary", repr(binary), "a `lean` executable of Lean 4",
            "install Lean with elan (https://github.com/leanprover/elan), or give binary=",
        )  # fmt: skip
    try:
        # The toolchain is trusted, outside of the sandbox too: what it is given to read is not.
        asked = subprocess.run([found, "--print-prefix"], capture_output=True, text=True, timeout=60, check=False)
        prefix = asked.stdout.strip()
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        prefix = ""
    inside = os.path.join(prefix, "bin", "lean")
    if prefix and os.path.isfile(inside):
        return inside, prefix
    found = os.path.realpath(found)
    return found, os.path.dirname(found)


@dataclass
class LeanVerifier:
    """Judges the tactics of Lean proofs: a `StepVerifier`. The rules are at the top of this file. [ours]

    Attributes:
        binary: the `lean` executable; the one on PATH by default. With a `sandbox`: its path there.
        header: Lean source in front of every statement: imports, `open`, options.
        wall_s: seconds for one proof.
        memory_mb: address space of Lean, MiB. Lean maps libraries into it: Mathlib needs more than the default.
        allow_local_code: run Lean on this machine, in `LocalSandbox`. APPORTION_ALLOW_LOCAL_CODE=1 is the same flag.
        sandbox: who runs it instead (a remote client).
        require: the least tier of local isolation.
        paths: folders of compiled libraries (LEAN_PATH).
        statement_column: the row's column with the theorem to prove.
        workers: proofs at a time.

    Raises:
        InputError: it is not allowed to run Lean here; there is no `lean`; root runs Lean as `nobody`, who may not
            read it. When called: a row without a statement.
    """

    binary: str | None = None
    header: str = ""
    wall_s: float = 60.0
    memory_mb: int = 4096
    allow_local_code: bool = False
    sandbox: Sandbox | None = None
    require: Tier = "process"
    paths: Sequence[str] = ()
    statement_column: str = "formal_statement"
    workers: int = 1
    _runner: Sandbox = field(init=False, repr=False)
    _readable: tuple[str, ...] = field(init=False, repr=False, default=())
    _alone: dict[str, bool] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.sandbox is not None:
            self.binary, self._runner = self.binary or "lean", self.sandbox
            return
        if not self.allow_local_code and os.environ.get(ALLOW_VARIABLE) != "1":
            raise InputError(
                "allow_local_code", self.allow_local_code, "True, or a sandbox: proofs are programs",
                f"allow_local_code=True (Python), {ALLOW_VARIABLE}=1 (environment), or sandbox=",
            )  # fmt: skip
        self.binary, folder = _toolchain(self.binary)
        if absent := [path for path in self.paths if not os.path.isdir(path)]:
            raise InputError("paths", absent[0], "folders that are there")
        # Packagers wrap lean in shell scripts.
        self._readable = (folder, *self.paths, "/bin/sh")
        private = [path for path in (self.binary, *self.paths) if os.geteuid() == 0 and _is_private(path)]
        if private:
            raise InputError(
                "binary", private[0], "files that every user may read: root runs Lean as nobody",
                "install it elsewhere, as with ELAN_HOME=/opt/elan",
            )  # fmt: skip
        self._runner = LocalSandbox(self.require)

    def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> list[Steps | None]:
        statements = [self.statement(row) for row in rows]
        with ThreadPoolExecutor(self.workers, "lean") as threads:
            return [verdict.steps for verdict in threads.map(self._verify, responses, statements)]

    def judge(self, response: str, row: Mapping[str, Any]) -> LeanVerdict:
        """The verdict on one response, with the reason for a failure or an abstention."""
        return self._verify(response, self.statement(row))

    def prove(self, given: str, response: str) -> Verdict:
        """The verdict on the whole proof of a statement, as a row gives it."""
        statement = read_statement(given, self.header, "gold")
        found = self._verify(response, statement)
        if found.steps is None:
            broke = not found.lost and self._stands(statement)
            return Verdict("wrong" if broke else "abstain", found.reason, statement.text, found.proof)
        if not found.steps or found.reason:
            return Verdict("wrong", found.reason, statement.text, found.proof)
        if _SORRY.search(found.proof or ""):
            return Verdict("wrong", "sorry is written in the proof", statement.text, found.proof)
        return Verdict("correct", "proved", statement.text, found.proof)

    def statement(self, row: Mapping[str, Any]) -> _Statement:
        """The row's theorem. Raises InputError where it has none."""
        given = row.get(self.statement_column)
        if not isinstance(given, str):
            raise InputError(
                self.statement_column, type(given).__name__, "the theorem to prove, in Lean",
                "name the data set's column with statement_column=",
            )  # fmt: skip
        return read_statement(given, self.header, self.statement_column)

    def _verify(self, response: str, statement: _Statement) -> LeanVerdict:
        proof, refusal = _read_proof(response, self.header, statement)
        if proof is None:
            return LeanVerdict([], refusal)
        if refusal:
            return proof.refused(refusal)
        try:
            messages = self._lean(proof)
        except SandboxError as error:
            return LeanVerdict(None, f"sandbox: {error}", proof.body, lost=True)
        if isinstance(messages, str):
            return LeanVerdict(None, messages, proof.body)
        end = proof.above.count("\n")
        above = next((m for m in messages if m.severity == "error" and m.line <= end), None)
        # A proof can be at fault there too: what exceeds a limit is reported at the theorem's name.
        if above and not self._stands(statement):
            return LeanVerdict(None, f"the header or the statement itself: {above.data[:300]}", proof.body)
        return _judge(proof, messages)

    def _stands(self, statement: _Statement) -> bool:
        """Whether header and statement are free of errors, with `sorry` for the proof."""
        if statement.text not in self._alone:
            try:
                messages = self._lean(_lay_out(self.header, statement, "by sorry", 0, False, 0))
            except SandboxError:
                return False
            if isinstance(messages, str):
                return False
            ended = any(_DEPENDS.search(m.data) for m in messages)
            self._alone[statement.text] = ended and all(m.severity != "error" for m in messages)
        return self._alone[statement.text]

    def _lean(self, proof: _Proof) -> list[Message] | str:
        """Lean's messages, or why there are none. Raises `SandboxError`."""
        environment = {"LEAN_PATH": os.pathsep.join(self.paths)} if self.paths else {}
        program = _PROGRAM.format(binary=self.binary, environment=environment)
        limits = Limits(self.wall_s, self.memory_mb, processes=64 * self.workers, readable=self._readable)
        report = self._runner.stdin(StdinJob(program, (proof.above + proof.body + proof.below,)), limits)
        if len(report.results) != 1:
            raise SandboxError(f"{len(report.results)} results for one proof")
        if report.results[0].error:
            return report.results[0].error
        messages = read_messages(report.results[0].output)
        return "the output is not that of lean --json" if messages is None else messages
