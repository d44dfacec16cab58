"""Programs judged by tests: Python tests that call them, or inputs and outputs.

The gold is the tests, in one of these forms:

* Python source: asserts, helper functions, a `def check(candidate)` with its call, `def test_...()` functions;
* a list of such sources (MBPP);
* a mapping with `tests` (source or list), optionally `hidden` (the same; failing ones are reported by number only),
  `setup` (source run before the tests), `entry_point` and `problem` or `prompt` (HumanEval: `test` defines `check`; a
  completion that does not define the entry point is appended to the prompt), or `stdin`: a list of
  {"input": text, "output": text}.

A gold whose tests would not all be run, or assert nothing, is refused: unittest and pytest classes, fixtures,
asynchronous tests, `except` with a class of the program's, inputs and outputs beside tests that call.

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
# A block that is cut off reaches to the end. The line that closes one holds no word: it would open another.
_FENCE = re.compile(
    r"^([ \t]*)(`{3,}|~{3,})[ \t]*([\w+-]*)[^`\n]*\n(.*?)(?:^[ \t]*\2[`~]*(?!\w)|\Z)", re.DOTALL | re.MULTILINE
)
_TAGS = ("python", "py", "python3", "py3")
# Comments, strings and imports from the future, as a program may start with.
_HEADER = re.compile(
    r"""\A(?:\s*(?:\#[^\n]*|\"{3}.*?\"{3}|'{3}.*?'{3}|"[^"\n]*"|'[^'\n]*'
    |from\s+__future__\s+import\s*(?:\([^)]*\)|[^\n(]*)))*""",
    re.DOTALL | re.VERBOSE,
)
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
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
        return False
    return any(
        isinstance(inside, ast.Assert | ast.Raise)
        or (isinstance(inside, ast.Expr) and isinstance(inside.value, ast.Call))
        for inside in ast.walk(node)
    )


def _asserts(node: ast.AST) -> bool:
    """Whether something here can fail on a wrong value: assert, raise, a call of `assert...` (numpy's, unittest's)."""
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return called.startswith("assert")
    return isinstance(node, ast.Assert | ast.Raise)


def _statements(tree: ast.Module) -> list[ast.stmt]:
    """The top level. A main guard counts where it asserts or calls what the tests define, not where it starts a test
    runner."""
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    statements: list[ast.stmt] = []
    for node in tree.body:
        if not isinstance(node, ast.If) or "__name__" not in ast.unparse(node.test):
            statements.append(node)
        elif any(_asserts(inside) or getattr(inside, "id", "") in defined for inside in ast.walk(node)):
            statements += node.body
    return statements


def _refuse_unrunnable(tree: ast.Module) -> None:
    """Raise for tests that would be passed over in silence, or that no program can pass here."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await) or getattr(node, "id", "") == "asyncio":
            raise UnreadableTests("asynchronous tests cannot cross into the sandbox")
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) else []
        if any(isinstance(method, ast.FunctionDef) and method.name.startswith("test") for method in inside):
            raise UnreadableTests("tests in classes are not run: write test functions, or asserts")


def _steps(source: str, prepares: bool = False) -> list[tuple[str, bool]]:
    """Top-level statements in order, and whether each is a test. Uncalled `test_...` functions are called, but where
    the source only prepares for tests."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableTests(f"the tests are not Python: {error}") from error
    _refuse_unrunnable(tree)
    statements = _statements(tree)
    if prepares:
        return [(ast.unparse(node), False) for node in statements]
    steps = [(ast.unparse(node), _is_test(node)) for node in statements]
    used = {node.id for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Name)}
    for node in statements:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and node.name not in used:
            if len(node.args.args) > len(node.args.defaults):
                raise UnreadableTests(f"{node.name} takes arguments (fixtures?) and nothing calls it")
            steps.append((f"{node.name}()", True))
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


def _own_exceptions(steps: Iterable[str], names: Iterable[str]) -> set[str]:
    """Names of the program's that the tests catch: classes do not cross, so that a right program would fail."""
    handlers = [node.type for node in ast.walk(ast.parse("\n".join(steps))) if isinstance(node, ast.ExceptHandler)]
    caught = {node.id for kind in handlers if kind for node in ast.walk(kind) if isinstance(node, ast.Name)}
    return caught & set(names)


def _read_stdin(record: Mapping[str, Any]) -> Tests:
    if any(record.get(key) for key in ("tests", "test", "hidden", "challenge_tests")):
        raise UnreadableTests("inputs and outputs, and tests that call: give one of them")
    pairs: list[tuple[str, str]] = []
    for pair in record["stdin"]:
        values = [pair.get(key) for key in ("input", "output")] if isinstance(pair, Mapping) else []
        if not values or not all(isinstance(value, str | int | float) for value in values):
            raise UnreadableTests("stdin tests need an input and an output each, as text")
        pairs.append((str(values[0]), str(values[1])))
    if not any(output.strip() for _, output in pairs):
        raise UnreadableTests("no test expects any output")
    return Tests(stdin=tuple(pairs), counted=tuple(range(len(pairs))))


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
    try:
        return _read_stdin(record) if record.get("stdin") else _read_calls(record)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        # The parser lets through what the compiler refuses; `ast.unparse` recurses deeper than the parser.
        raise error if isinstance(error, UnreadableTests) else UnreadableTests(f"not Python: {error}") from error


def _read_calls(record: Mapping[str, Any]) -> Tests:
    entry_point = str(record.get("entry_point") or "")
    prompt = str(record.get("prompt") or record.get("problem") or "") if entry_point else ""
    helpers = _prompt_helpers(prompt, entry_point)
    steps: list[tuple[str, bool]] = []
    for source in (helpers, *_sources(record.get("setup"), "setup")):
        steps += _steps(source, prepares=True)
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
    if not any(_asserts(node) for node in ast.walk(ast.parse("\n".join(texts)))):
        raise UnreadableTests("the tests assert nothing")
    names = tuple(_free_names(texts, entry_point))
    if own := _own_exceptions(texts, names):
        raise UnreadableTests(f"the tests catch {', '.join(sorted(own))}, a class that cannot cross into the sandbox")
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
    pattern = rf"^(?:async +)?(?:def|class) +{name}\b|^{name} *(?::[^=\n]*)?=(?!=)"
    return re.search(pattern, source, re.MULTILINE) is not None


def _dedented(indent: str, body: str) -> str:
    return re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", body, flags=re.MULTILINE) if indent else body


def _behind_future(helpers: str, text: str) -> str:
    """The program with `helpers` in front, but for imports from the future, which must stay first."""
    header = _HEADER.match(text)
    at = header.end() if header and "__future__" in header.group() else 0
    return f"{text[:at]}\n{helpers}\n{text[at:]}" if at else f"{helpers}\n{text}"


def program_of(prediction: str, tests: Tests) -> str:
    """The program in a response: of its fenced blocks the last one among those that define most of what the tests
    call, Python's before ones without a language; without blocks the whole text after `</think>`; a bare completion
    goes behind its prompt."""
    text = after_thinking(prediction)
    if text is None:
        return ""
    found = [(tag.lower(), _dedented(indent, body)) for indent, _, tag, body in _FENCE.findall(text)]
    if blocks := [(tag, body) for tag, body in found if tag in ("", *_TAGS)]:
        wanted = [name for name, module in _names(tests).items() if module is None]
        ranks = [(sum(_defines(body, name) for name in wanted), tag != "", n) for n, (tag, body) in enumerate(blocks)]
        text = blocks[max(ranks)[2]][1]
    if not tests.entry_point:
        return text
    if _defines(text, tests.entry_point):
        return _behind_future(tests.helpers, text)
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
    levelled = [[line.rstrip() for line in text.rstrip().split("\n")] for text in (wanted, got)]
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


def _legible(text: str) -> str:
    # What a program raised may hold halves of characters, which no file takes.
    return text.encode("utf-8", "backslashreplace").decode()


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
        which = _name(tests, first) + (
            f" ({_legible(report.results[first].error)})" if first < tests.hidden_from else ""
        )
        return Verdict("wrong", f"{passed} of {shown} passed; first failure: {which}", shown, program), judged
    broken = next((result for result in report.results if result.blame), None)
    if broken is not None:
        said = _legible(broken.error) if report.results.index(broken) < tests.hidden_from else "a hidden one"
        return Verdict("abstain", f"a test fails by itself: {said}", shown, program), judged
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
