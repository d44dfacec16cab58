"""The group view without a browser: what it reads is in the chunk, and its arithmetic, run by Node, by hand.

Planted in a copy of group.js and seen caught here: V̂ of the next state, or past the end of a response; the first or
any change of the gap taken for its largest rise, or the gap with the wrong sign; the line led to the reward where
increments do not add up to it, or not for a pipeline's stage; a response without a reward put below the mean or first;
lanes sorted the other way; progress by the longest response; a group of one reward called σ = 0; the filter turned
around; a reason left out of a lane's label; continuations that are not recorded told as 0; a field that no chunk has.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

from apportion.report.page import SCRIPTS
from apportion.report.view import StepView

HERE = files("apportion.report")
SCRIPT, STYLE = ((HERE / name).read_text(encoding="utf-8") for name in ("group.js", "group.css"))
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node on PATH to run group.js with")

# As much of a page as the script touches while it is read.
PAGE = """
const VIEWS = {}, index = {};
const state = { view: "group", step: { step: 3, groups: [], invariants: {}, responses: [] }, response: null };
const responsesOf = (group) => state.step.responses.filter((r) => r.group === group);
const address = (to) => JSON.stringify(to);
globalThis.window = { addEventListener() {} };
globalThis.ResizeObserver = class { observe() {} };
globalThis.document = { getElementById: () => null };
"""


def evaluate(*expressions: str, before: str = "") -> list[Any]:
    """What JavaScript expressions are worth after group.js was read."""
    script = (HERE / "dom.js").read_text(encoding="utf-8") + PAGE + SCRIPT + before
    told = f"{script}\nconsole.log(JSON.stringify([{', '.join(expressions)}]));"
    done = subprocess.run([str(NODE), "-"], input=told, capture_output=True, text=True, timeout=30, check=True)
    return json.loads(done.stdout)


def response(**given: Any) -> dict[str, Any]:
    plain = {
        "row": 4, "group": 0, "reward": 1.0, "verdict": "correct", "finish": "stop", "base": 0.5, "mean": 0.5,
        "divisor": 0.5, "length": 10, "pivots": 0, "continuations": 0, "values": [], "strip": [], "why": None,
    }  # fmt: skip
    return {**plain, **given}


def js(value: Any) -> str:
    return json.dumps(value)


# μ = .5 up to token 4, .75 up to token 7, .25 after it.
WORKED = response(values=[[0, 0.5, 0.0, 0], [4, 0.75, 0.1, 4], [7, 0.25, 0.1, 4]], pivots=2, continuations=8)


# --- what it is made of -----------------------------------------------------------------------------------------


def test_everything_it_reads_of_a_chunk_is_there(run):
    summary = StepView(run, run.steps()[-1]).summary
    owners = {
        r"(?:state\.step|\bstep)": {"step": summary},
        r"\bgroup": {"group": summary["groups"][0]}, r"\b(?:r|a|b|m|scored)": {"response": summary["responses"][0]},
        r"\bspent": {"spent": summary["groups"][0]["spent"]},
    }  # fmt: skip
    built_in = {"length", "map", "filter", "find", "some", "every", "after", "before"}
    for owner, found in owners.items():
        read = set(re.findall(rf"(?<![.\w]){owner}\.([a-z]\w*)", SCRIPT)) - built_in
        assert read and read <= next(iter(found.values())).keys(), (owner, read)


def test_no_name_of_it_is_taken():
    names: dict[str, str] = {}
    for script in ("live.js", *SCRIPTS):
        source = (HERE / script).read_text(encoding="utf-8")
        for name in re.findall(r"^(?:async )?(?:function|const|let|class) (\w+|\$)", source, re.MULTILINE):
            assert names.setdefault(name, script) == script, name


def test_styles_are_of_classes_that_it_draws():
    shared = "".join((HERE / name).read_text(encoding="utf-8") for name in ("dom.js", "charts.js", "page.html"))
    named = set(re.findall(r"\.([a-z][\w-]*)(?=[\s:,.{>\[])", re.sub(r"\{[^}]*\}", "{", STYLE)))
    assert len(named) > 30 and named <= set(re.findall(r"[\w-]+", SCRIPT + shared))


@pytest.mark.parametrize(
    "rule",
    [
        r"\.edge\.neg \{[^}]*stroke-dasharray", r"\.side\.wrong \{[^}]*stroke-dasharray",
        r"\.side-key\.wrong::before \{[^}]*dashed", r"\.tally-bar \.wrong \{[^}]*repeating-linear-gradient",
    ],
)  # fmt: skip
def test_colour_is_never_alone(rule):
    """Gain and loss, right and wrong differ in how they are drawn as well."""
    assert re.search(rule, STYLE)


# --- its arithmetic ---------------------------------------------------------------------------------------------


@needs_node
def test_value_along_a_response():
    ask = [f"valueAlong({js(WORKED)}, {place}, (r, t) => t / 10)" for place in (0, 0.39, 0.4, 0.69, 0.7, 1, 1.01)]
    assert evaluate(*ask) == [0.5, 0.5, 0.75, 0.75, 0.25, 0.25, None]
    # On an axis of 20 tokens the response of 10 ends half way.
    assert evaluate(*(f"valueAlong({js(WORKED)}, {place}, (r, t) => t / 20)" for place in (0.2, 0.5, 0.51))) == [
        0.75,
        0.25,
        None,
    ]


@needs_node
def test_where_right_and_wrong_part():
    # The gap is 0 up to 30 %, .2 up to 60 %, .7 from there on: it grows by .2 in 20–30 … and most in 50–60.
    right = [0.5] * 30 + [0.6] * 30 + [0.9] * 41
    wrong = [0.5] * 30 + [0.4] * 30 + [0.2] * 41
    found = evaluate(f"widest([{js(right)}, {js(wrong)}])")[0]
    assert (found["from"], found["to"]) == (0.5, 0.6)
    assert (round(found["before"], 9), round(found["after"], 9)) == (0.2, 0.7)
    # A gap that only shrinks is no parting, nor is one of curves that are not there.
    shrinks, nowhere = [1 - k / 100 for k in range(101)], [None] * 101
    assert evaluate(f"widest([{js(shrinks)}, {js([0] * 101)}])", f"widest([{js(right)}, {js(nowhere)}])") == [
        None,
        None,
    ]


@needs_node
def test_the_line_ends_at_the_reward_only_where_increments_add_up_to_it():
    at, y = "(t) => 10 * t", "(v) => 100 - 100 * v"
    line = f"laneLine({js(WORKED)}, {js(WORKED['values'])}, {at}, {y})"
    steps = "M0.0,50.0H40.0L40.0,25.0H70.0L70.0,75.0H100.0"
    assert evaluate(line) == [steps]
    assert evaluate(line, before='state.step.invariants = { "probepo/telescoping": 0 };') == [f"{steps}V0.0"]


@needs_node
def test_sides_are_by_the_groups_mean():
    half = response(reward=0.5, verdict="partial")
    sides = [f"sideOf({js(response(reward=r))}, 0.5)" for r in (1.0, 0.5, 0.0, None)]
    assert evaluate(*sides) == [1, 0, -1, 0]
    binary = evaluate(f"isBinary([{js(response())}, {js(response(verdict='abstain'))}])", f"isBinary([{js(half)}])")
    assert binary == [True, False]


@needs_node
def test_axes():
    pair = f"[{js(response(length=10))}, {js(response(length=40))}]"
    shares = evaluate(f"laneAxis({pair})({pair}[0], 5)", f"laneAxis({pair})({js(response(length=0))}, 0)")
    assert shares == [0.5, 0]
    assert evaluate(f"laneAxis({pair})({pair}[0], 5)", before='lanes.unit = "tokens";') == [0.125]


@needs_node
@pytest.mark.parametrize(
    ("sort", "rows"),
    [("reward", [2, 0, 1, 3]), ("row", [0, 1, 2, 3]), ("length", [1, 0, 2, 3]), ("base", [2, 3, 0, 1]),
     ("continuations", [3, 0, 1, 2])],
)  # fmt: skip
def test_sorting(sort, rows):
    # Ties stand by row; a response without a reward is last, one whose continuations are not recorded has none.
    given = [
        response(row=0, reward=0.0, length=20, base=-0.5), response(row=1, reward=0.0, length=30, base=-0.5),
        response(row=2, reward=1.0, length=20, base=1.0, continuations=None),
        response(row=3, reward=None, length=10, base=0.0, continuations=8),
    ]  # fmt: skip
    before = f"state.step.responses = {js(given)}; state.response = state.step.responses[0]; lanes.sort = '{sort}';"
    assert evaluate("laneMembers().map((r) => r.row)", before=before)[0] == rows


@needs_node
def test_a_lane_says_all_in_words():
    pivots = WORKED["values"][1:]
    assert evaluate(f"laneSays({js(WORKED)}, {js(pivots)}, 0.25)") == [
        "Response 4, right, reward 1, 10 tokens, base advantage +0.50, 2 pivots: value 0.75 at 40 %, 0.25 at 70 %, "
        "8 continuations, 25 % of the group’s"
    ]
    lost = response(reward=0.0, verdict="wrong", finish="length", base=-0.25, why="no step starts inside it")
    assert evaluate(f"laneSays({js(lost)}, [], 0)") == [
        "Response 4, wrong, reward 0, 10 tokens, cut at the length limit, base advantage −0.25, "
        "no pivot: no step starts inside it, 0 continuations"
    ]
    silent = response(reward=None, verdict="abstain", base=None, continuations=None)
    assert evaluate(f"laneSays({js(silent)}, [], 0)") == [
        "Response 4, no reward, reward –, 10 tokens, base advantage –, no pivot, continuations not recorded"
    ]


@needs_node
def test_a_level_group_is_named():
    level = {"collapsed": True, "scored": 8, "why": "σ = 0: all rewards are equal", "spent": {"continuations": 0}}
    ask = [f"[groupLabel({js(g)}), levelWords({js(g)})]" for g in (
        level, {**level, "scored": 1, "why": "only one response has a reward"},
        {**level, "why": None, "spent": {"continuations": 105}}, {**level, "why": "the method measures nothing"},
    )]  # fmt: skip
    equal = "All rewards of this group are equal, so there is nothing to tell its responses apart by."
    assert evaluate(*ask) == [
        ["σ = 0", f"{equal} No continuation was spent here."],
        ["Nothing to compare", "Only one response has a reward. No continuation was spent here."],
        ["σ = 0", equal],
        ["σ = 0", f"{equal} No pivot: the method measures nothing. No continuation was spent here."],
    ]
    assert evaluate(f"groupLabel({js({**level, 'collapsed': False})})") == [""]


@needs_node
def test_the_filter_leaves_groups_whose_rewards_differ():
    groups = [{"name": name, "collapsed": name == "b"} for name in "abc"]
    before = f"state.step.groups = {js(groups)};"
    assert evaluate("groupsShown().map(({ g }) => g)", before=before) == [[0, 1, 2]]
    assert evaluate("groupsShown().map(({ g }) => g)", before=f"{before} lanes.mixed = true;") == [[0, 2]]
