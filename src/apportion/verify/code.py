"""Programs judged by tests: Python tests that call them, or inputs and outputs.

The gold is the tests, in one of these forms:

* Python source: asserts, helper functions, a `def check(candidate)` with its call, `def test_...()` functions;
* a list of such sources (MBPP);
* a mapping with `tests` (source or list), optionally `hidden` (the same; failing ones are reported by number only),
  `setup` (source run before the tests), `entry_point` and `problem` or `prompt` (HumanEval: `test` defines `check`; a
  completion that does not define the entry point is appended to the prompt), or `stdin`: a list of
  {"input": text, "output": text}.

The tests run in a process that never holds the program's objects; each call crosses to the sandboxed program and a
plain value comes back, so an object that claims to equal everything is refused where it would be compared. What a
program does to its arguments does not come back either: tests of in-place changes do not work here.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import symtable
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from apportion.errors import InputError
from apportion.verify.extract import after_thinking
from apportion.verify.sandbox import CallJob, Limits, LocalSandbox, Sandbox, SandboxError, StdinJob, Tier
from apportion.verify.verdict import Verdict

ALLOW_VARIABLE = "APPORTION_ALLOW_LOCAL_CODE"
LOCAL_CODE_OFF = (
    "running programs here is off. Fix: --allow-local-code (apportion grade), allow_local_code=True (Python), "
    f"{ALLOW_VARIABLE}=1 (environment), or a sandbox"
)
_FENCE = re.compile(r"^```[ \t]*([\w+-]*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Names that tests borrow without importing them: never taken from the program while it has a name of its own to test.
_LIBRARY = {
    **dict.fromkeys(("isclose", "sqrt", "floor", "ceil", "pi", "inf", "nan", "isnan", "factorial"), "math"),
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"), "collections"),
    **dict.fromkeys(("List", "Dict", "Tuple", "Set", "Optional", "Any", "Union", "Callable"), "typing"),
    **dict.fromkeys(("reduce", "partial"), "functools"),
    **dict.fromkeys(("permutations", "combinations", "product", "chain"), "itertools"),
    "deepcopy": "copy",
    "Fraction": "fractions",
    "Decimal": "decimal",
}


@dataclass(frozen=True)
class CodeSettings:
    """How programs are run. [ours]

    Attributes:
        allow_local_code: run the program on this machine, in `LocalSandbox`. Off, there is no verdict without a
            `sandbox`. The environment variable APPORTION_ALLOW_LOCAL_CODE=1 is the same flag.
        sandbox: who runs it instead (a remote client).
        require: the least tier of local isolation: "process", "namespaces", "fenced" (see `sandbox`).
        wall_s: seconds for all tests of one program.
        memory_mb: address space, MiB.
        packages: let programs and tests import what this environment has installed, not the standard library only.
        output: how standard output is compared: "lines" (trailing space and blank lines at the end do not count),
            "tokens" (all whitespace alike), "exact".
    """

    allow_local_code: bool = False
    sandbox: Sandbox | None = None
    require: Tier = "process"
    wall_s: float = 10.0
    memory_mb: int = 512
    packages: bool = False
    output: str = "lines"

    def __post_init__(self) -> None:
        if self.output not in ("lines", "tokens", "exact"):
            raise InputError("output", repr(self.output), "one of lines, tokens, exact")

    def runner(self) -> Sandbox | None:
        """Who runs programs under these settings; None if nobody may."""
        if self.sandbox is not None:
            return self.sandbox
        allowed = self.allow_local_code or os.environ.get(ALLOW_VARIABLE) == "1"
        return LocalSandbox(self.require) if allowed else None


class UnreadableTests(ValueError):
    """The gold holds no test that could be run."""


@dataclass(frozen=True)
class Tests:
    """A gold, read. `counted`: indices of the steps that are tests; `hidden`: those from `hidden` on are not shown."""

    steps: tuple[str, ...] = ()
    counted: tuple[int, ...] = ()
    hidden_from: int = sys.maxsize
    names: tuple[str, ...] = ()
    entry_point: str = ""
    prompt: str = ""
    helpers: str = ""
    stdin: tuple[tuple[str, str], ...] = ()


def _sources(value: Any, name: str) -> list[str]:
    if value is None:
        return []
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(item, str) for item in listed):
        raise UnreadableTests(f"{name} is neither Python source nor a list of it")
    return list(listed)


def _is_test(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
        return False
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return any(isinstance(inside, ast.Assert) for inside in ast.walk(node))


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _steps(source: str) -> list[tuple[str, bool]]:
    """Top-level statements in order, and whether each is a test. Uncalled `test_...` functions are called."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableTests(f"the tests are not Python: {error}") from error
    steps = [(ast.unparse(node), _is_test(node)) for node in tree.body if not _is_main_guard(node)]
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not node.args.args:
            steps += [(f"{node.name}()", True)] if node.name not in called else []
    return steps


def _free_names(steps: Iterable[str], entry_point: str) -> list[str]:
    """Global names that the tests use and do not define: the program's, or a library's."""
    table = symtable.symtable("\n".join(steps), "tests", "exec")
    defined = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    used: set[str] = set()
    waiting = [table]
    while waiting:
        scope = waiting.pop()
        waiting += scope.get_children()
        used |= {s.get_name() for s in scope.get_symbols() if s.is_referenced() and (scope is table or s.is_global())}
    free = used - defined
    names = sorted(name for name in free if name == entry_point or not hasattr(builtins, name))
    # Tests that name nothing but builtins test a program that defines one of them (MBPP has a `sum`).
    return names or sorted(name for name in free if not isinstance(getattr(builtins, name), type))


def _prompt_helpers(prompt: str, entry_point: str) -> str:
    """What a prompt defines beside the entry point: part of the task, so the tests get it from there."""
    try:
        tree = ast.parse(prompt)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    kept = [node for node in tree.body if getattr(node, "name", None) != entry_point]
    return "\n".join(ast.unparse(node) for node in kept)


def read_tests(gold: Any) -> Tests:
    """The tests of a gold in any of the forms above. Raises `UnreadableTests`."""
    record: Mapping[str, Any] = gold if isinstance(gold, Mapping) else {"tests": gold}
    if record.get("stdin"):
        try:
            pairs = tuple((str(pair["input"]), str(pair["output"])) for pair in record["stdin"])
        except (TypeError, KeyError) as error:
            raise UnreadableTests("stdin tests need an input and an output each") from error
        return Tests(stdin=pairs, counted=tuple(range(len(pairs))))
    entry_point = str(record.get("entry_point") or "")
    prompt = str(record.get("prompt") or record.get("problem") or "") if entry_point else ""
    helpers = _prompt_helpers(prompt, entry_point)
    steps = [
        (text, False) for source in [helpers, *_sources(record.get("setup"), "setup")] for text, _ in _steps(source)
    ]
    for source in _sources(record.get("tests", record.get("test")), "tests"):
        steps += _steps(source)
    defines_check = any(text.startswith("def check(") for text, _ in steps)
    if defines_check and not any(text.startswith("check(") for text, _ in steps):
        if not entry_point:
            raise UnreadableTests("the tests define check() but neither call it nor name an entry_point")
        steps.append((f"check({entry_point})", True))
    hidden_from = len(steps)
    for source in _sources(record.get("hidden", record.get("challenge_tests")), "hidden"):
        steps += _steps(source)
    texts = tuple(text for text, _ in steps)
    counted = tuple(number for number, (_, is_test) in enumerate(steps) if is_test)
    if not counted:
        raise UnreadableTests("there are no tests")
    names = tuple(_free_names(texts, entry_point))
    return Tests(texts, counted, hidden_from, names, entry_point, prompt, helpers)


def unreadable_gold(gold: Any, settings: CodeSettings) -> str | None:
    """Why a gold holds no tests that can be run; None if it does."""
    try:
        tests = read_tests(gold)
    except UnreadableTests as error:
        return str(error)
    if not tests.stdin and not tests.names:
        return "no test calls the program"
    return None


def _defines(source: str, name: str) -> bool:
    name = re.escape(name)
    return re.search(rf"^(?:async +)?(?:def|class) +{name}\b|^{name} *[:=]", source, re.MULTILINE) is not None


def program_of(prediction: str, tests: Tests) -> str:
    """The program in a response: the last fenced block (that defines the entry point, when it is known), else the
    whole text after `</think>`; a bare completion goes behind its prompt."""
    text = after_thinking(prediction)
    if text is None:
        return ""
    blocks = [body for language, body in _FENCE.findall(text) if language.lower() in ("", "python", "py", "python3")]
    if blocks:
        defining = [block for block in blocks if tests.entry_point and _defines(block, tests.entry_point)]
        text = (defining or blocks)[-1]
    if not tests.entry_point:
        return text
    if _defines(text, tests.entry_point):
        return f"{tests.helpers}\n{text}"
    return tests.prompt + text


def _names(tests: Tests) -> dict[str, str | None]:
    library = {name: name if name in sys.stdlib_module_names else _LIBRARY.get(name) for name in tests.names}
    if tests.entry_point:
        library[tests.entry_point] = None
    # If the tests name nothing else, then what they test has a library's name.
    return library if any(module is None for module in library.values()) else dict.fromkeys(library)


def _compare_output(wanted: str, got: str, rule: str) -> bool:
    if rule == "exact":
        return wanted == got
    if rule == "tokens":
        return wanted.split() == got.split()
    levelled = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (wanted, got)]
    return levelled[0] == levelled[1]


def grade(gold: Any, prediction: str, settings: CodeSettings) -> Verdict:
    """Correct when every test passes. Abstains on zero tests, on a test that fails by itself, on a sandbox failure,
    and where nobody may run the program."""
    return judge(gold, prediction, settings)[0]


def judge(gold: Any, prediction: str, settings: CodeSettings) -> tuple[Verdict, list[tuple[str, bool]]]:
    """As `grade`, and the tests in order: (name, whether it passed). They mean nothing where it abstains.

    A name is the test's source, cut off at 120 characters; hidden tests and inputs have a number. A statement between
    the tests that fails by the program is listed as a failed one.
    """
    try:
        tests = read_tests(gold)
    except UnreadableTests as error:
        return Verdict("abstain", str(error)), []
    shown = f"{len(tests.counted)} tests"
    program = program_of(prediction, tests)
    runner = settings.runner()
    if runner is None:
        return Verdict("abstain", LOCAL_CODE_OFF, shown), []
    if not program.strip():
        missing = [(_name(tests, number), False) for number in tests.counted]
        return Verdict("wrong", "no program found", shown, None), missing
    limits = Limits(settings.wall_s, settings.memory_mb, packages=settings.packages)
    try:
        if tests.stdin:
            return _grade_stdin(tests, program, settings, runner, limits)
        return _grade_calls(tests, program, runner, limits)
    except SandboxError as error:
        return Verdict("abstain", f"sandbox: {error}", shown, program), []


def _name(tests: Tests, number: int) -> str:
    # A hidden test's text and values must not reach whoever writes the next prompt.
    if number >= tests.hidden_from:
        return f"hidden test {number - tests.hidden_from + 1}"
    return f"test {number + 1}" if tests.stdin else tests.steps[number][:120]


def _grade_calls(tests: Tests, program: str, runner: Sandbox, limits: Limits) -> tuple[Verdict, list[tuple[str, bool]]]:
    shown = f"{len(tests.counted)} tests"
    report = runner.call(CallJob(program, tests.steps, tests.counted, _names(tests)), limits)
    if len(report.results) != len(tests.steps):
        raise SandboxError(f"{len(report.results)} results for {len(tests.steps)} steps")
    failed = [number for number, result in enumerate(report.results) if result.blame == "program"]
    listed = sorted({*tests.counted, *failed})
    judged = [(_name(tests, number), not report.results[number].blame) for number in listed]
    if failed:
        passed = sum(not report.results[number].blame for number in tests.counted)
        first = failed[0]
        which = _name(tests, first) + (f" ({report.results[first].error})" if first < tests.hidden_from else "")
        return Verdict("wrong", f"{passed} of {shown} passed; first failure: {which}", shown, program), judged
    broken = next((result for result in report.results if result.blame), None)
    if broken is not None:
        return Verdict("abstain", f"a test fails by itself: {broken.error}", shown, program), judged
    if report.calls == 0:
        return Verdict("abstain", "no test called the program", shown, program), judged
    return Verdict("correct", f"all {shown} passed", shown, program), judged


def _grade_stdin(
    tests: Tests, program: str, settings: CodeSettings, runner: Sandbox, limits: Limits
) -> tuple[Verdict, list[tuple[str, bool]]]:
    shown = f"{len(tests.stdin)} tests"
    report = runner.stdin(StdinJob(program, tuple(given for given, _ in tests.stdin)), limits)
    if len(report.results) != len(tests.stdin):
        raise SandboxError(f"{len(report.results)} results for {len(tests.stdin)} inputs")
    right = [
        not result.error and _compare_output(wanted, result.output, settings.output)
        for (_, wanted), result in zip(tests.stdin, report.results, strict=True)
    ]
    judged = [(_name(tests, number), passed) for number, passed in enumerate(right)]
    if all(right):
        return Verdict("correct", f"all {shown} passed", shown, program), judged
    first = right.index(False)
    error = report.results[first].error or "other output"
    return Verdict("wrong", f"{sum(right)} of {shown} passed; test {first + 1}: {error}", shown, program), judged
