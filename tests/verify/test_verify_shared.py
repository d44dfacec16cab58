"""The shared data, where it is present: the grader cases, every gold against itself, canonical programs.

The short versions look at a sample; the whole sets are behind `slow`.
"""

import ast
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from apportion.verify import grade, grade_many
from apportion.verify.extract import MAX_BARE_CHARS
from apportion.verify.math import MathSettings, gold_answers
from apportion.verify.normalise import normalise
from apportion.verify.pool import shared_pool

# Rows that describe a harness instead of giving one; their kinds are tested in test_verify_code.py.
DESCRIBED = {"c02", "c03", "c05", "c06", "c10", "c14"}
SETS = [
    "math500",
    "math_train",
    "math_test_minus500",
    "aime24",
    "amc23_40",
    "amc_83",
    "minerva_math",
    "olympiadbench",
    "college_math",
    "gsm8k_train",
    "gsm8k_test",
]
EMPTY = {"math_train": 2}
# The part of a set's golds that is not read (prose mixed with formulas, mostly) and so matches word for word only.
UNREAD = {"college_math": 0.12}


def test_grader_cases(shared_rows):
    rows = [row for row in shared_rows("grader_cases.jsonl") if row["id"] not in DESCRIBED]
    kinds = {"math-policy": "math", "scorer": "math"}
    items = [{**row, "kind": kinds.get(row["kind"], row["kind"])} for row in rows]
    verdicts = grade_many(items, {"code": {"allow_local_code": True, "wall_s": 30}})
    expected = {True: "correct", False: "wrong"}
    bad = [
        (row["id"], verdict)
        for row, verdict in zip(rows, verdicts, strict=True)
        if verdict.outcome != expected[row["expected"]]
    ]
    assert not bad


def in_a_box(row, golds):
    """The verdict on the row's own answer, in a response."""
    return grade("math", golds, rf"Therefore, \boxed{{{row['answer'].strip()}}}.")


@pytest.mark.parametrize("name", SETS)
def test_golds_equal_themselves(shared_rows, name):
    rows = shared_rows(f"data/{name}.jsonl.gz")
    empty = [row for row in rows if not gold_answers(row["answer"])]
    assert len(empty) == EMPTY.get(name, 0)
    there = [row for row in rows if row not in empty]
    bad = [row["id"] for row in there if in_a_box(row, [row["answer"], *row.get("answers", [])]).outcome != "correct"]
    assert not bad
    # A response that is the gold and nothing else says the same.
    alone = [row for row in there[:: max(1, len(there) // 300)] if len(row["answer"]) <= MAX_BARE_CHARS]
    assert not [row["id"] for row in alone if grade("math", row["answer"], row["answer"]).outcome != "correct"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_all_golds_equal_themselves_as_trees(shared_rows, name):
    # Past the spelling: whatever is read must equal itself through the comparison, too.
    answers = [golds for row in shared_rows(f"data/{name}.jsonl.gz") if (golds := gold_answers(row["answer"]))]
    pool, settings = shared_pool(1024), asdict(MathSettings())

    def outcome(golds):
        job = {"task": "math", "golds": golds, "answer": normalise(golds[-1]), "settings": settings}
        done = pool.run(job, 30.0)
        return done.value["outcome"] if done.state == "done" else done.reason

    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(outcome, answers))
    pairs = list(zip(answers, outcomes, strict=True))
    assert not [pair for pair in pairs if pair[1] not in ("correct", "abstain")]
    unread = [golds for golds, found in pairs if found == "abstain"]
    assert len(unread) <= len(answers) * UNREAD.get(name, 0.02), unread


class _Changed(ast.NodeTransformer):
    """Every value that the tested functions return becomes another one. (Not their helpers' too: two changes may
    cancel out.)"""

    def __init__(self, tests):
        self.tests = tests

    def visit_FunctionDef(self, node):
        return self.generic_visit(node) if f"{node.name}(" in self.tests else node

    def visit_Return(self, node):
        value = node.value or ast.Constant(None)
        return ast.copy_location(ast.Return(ast.Call(ast.Name("changed", ast.Load()), [value], [])), node)


CHANGED = """
def changed(x):
    if isinstance(x, bool): return not x
    if isinstance(x, (int, float)): return x + 1
    if isinstance(x, str): return x + "x"
    if isinstance(x, (list, tuple)): return x + type(x)([0])
    if isinstance(x, dict): return {**x, "zz": 1}
    if isinstance(x, set): return x | {"zz"}
    return 0 if x is None else None
"""


def change(source, tests):
    return CHANGED + ast.unparse(ast.fix_missing_locations(_Changed(tests).visit(ast.parse(source))))


def programs(shared_rows, name, step):
    """(id, gold, canonical completion, whole changed program) of every `step`-th row."""
    for row in shared_rows(f"data/{name}.jsonl.gz")[::step]:
        if name == "humaneval":
            gold = {key: row[key] for key in ("test", "entry_point", "problem")}
            changed = change(row["problem"] + row["solution"], f"{row['entry_point']}(")
        else:
            gold = {key: row[key] for key in ("tests", "challenge_tests", "setup")}
            changed = change(row["solution"], " ".join(row["tests"]).replace(" (", "("))
        yield row["id"], gold, row["solution"], changed


def check_programs(shared_rows, name, step):
    cases = list(programs(shared_rows, name, step))
    settings = {"code": {"allow_local_code": True, "wall_s": 60}}
    for position, wanted in ((2, "correct"), (3, "wrong")):
        items = [{"kind": "code", "gold": case[1], "prediction": case[position]} for case in cases]
        verdicts = grade_many(items, settings)
        bad = [
            (case[0], verdict.reason)
            for case, verdict in zip(cases, verdicts, strict=True)
            if verdict.outcome != wanted
        ]
        assert not bad


@pytest.mark.parametrize(("name", "step"), [("humaneval", 16), ("mbpp", 97)])
def test_canonical_programs_pass_and_changed_ones_fail(shared_rows, name, step):
    check_programs(shared_rows, name, step)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_all_canonical_programs_pass_and_changed_ones_fail(shared_rows, name):
    check_programs(shared_rows, name, 1)
