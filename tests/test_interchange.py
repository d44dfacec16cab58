"""The interchange file, without a command line: what is read, what is refused, what is written.

Golden files stand in `golden/interchange`; their equations are beside `GOLDEN`.

Planted faults that these tests were seen to catch. Reading: boundaries one token late, mask ignored, `finish`
inverted, a null reward read as 0, evidence put on the row before, entropy read from `old_logprob`, rows counted
where lines should be, true and false taken for numbers, lengths unchecked, a repeated boundary or one at T let
through, text read where the host forgot its boundaries. Planning: no second wave, a pivot shared with itself,
VinePPO without its check of every row. Writing: the sign, advantages one token late, segments on the wrong row, −0
lost, float64 expansions instead of the shortest form, NaN let through.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion import interchange
from apportion.credit.boundaries import step_positions
from apportion.credit.registry import make_method
from apportion.errors import InputError
from apportion.interchange.lines import _shortest
from apportion.segments import step_starts
from strategies import Batch as Drawn
from strategies import batches

HERE = Path(__file__).parent / "golden" / "interchange"

# (a) ProbePO: μ = σ = .5 (population), V_k = (4·raw + 4·μ)/8 = .625, .375; Δ/σ = .25, −.5, 1.25; their token
#     mean (4·.25 − 3·.5 + 3·1.25)/10 = .325; A = A_base + D − .325 with A_base = (1 − .5)/.5 = 1.
# (b) ProbePO: rewards 1, 0, 2 have μ = 1 and sample σ = 1, so A_base = 0; raw 2 with n₀ = 0 gives D = (2 − 1)/1,
#     (1 − 2)/1; mean over the three trainable tokens 1/3; D̃ = .667, .667, −1.333, and the masked token 0.
# VinePPO: V = .5, .75, .25 and r = 1: V(next) − V(here) = .25, −.5, and r − V(last) = .75.
GOLDEN = {
    "probepo_a": ("probepo", {"alpha": 1, "n0": 4, "ddof": 0, "epsilon": 0}),
    "probepo_b": ("probepo", {"alpha": 1, "n0": 0, "ddof": 1, "epsilon": 0}),
    "vineppo": ("vineppo", {}),
}


def as_lines(rows: list[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(row).encode() + b"\n" for row in rows]


def read(lines: list[bytes]) -> interchange.Batch:
    return interchange.read(interchange.objects(lines))


def assign(lines: list[bytes], method: str, **chosen: Any) -> list[dict[str, Any]]:
    batch = read(lines)
    credit = interchange.assign(batch, make_method(method, chosen))
    return [json.loads(line, parse_constant=refuse) for line in interchange.credit_lines(batch, credit)]


def plan(lines: list[bytes], method: str, **chosen: Any) -> list[dict[str, Any]]:
    batch = read(lines)
    jobs = interchange.plan(batch, make_method(method, chosen))
    return [json.loads(line, parse_constant=refuse) for line in interchange.request_lines(batch, jobs)]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} in the output is no JSON")


def response(**change: Any) -> dict[str, Any]:
    """A row with everything in it; a change to None removes the field."""
    row = {
        "group": "q",
        "reward": 1.0,
        "token_ids": [5, 6, 7, 8],
        "mask": [1, 1, 1, 0],
        "text": "ab\n\ncd",
        "offsets": [0, 1, 4, 6],
        "old_logprob": [-0.5, -0.25, -1, -2],
        "ref_logprob": [-0.5, -0.25, -1, -2],
        "entropy": [0.5, 1, 2, 0],
        "boundaries": [2],
        "finish": "stop",
        "path": ["root", "left"],
        "evidence": {"continuations": [{"position": 2, "rewards": [1, 0, None]}], "other": "not read"},
        **change,
    }
    return {field: value for field, value in row.items() if value is not None or field == "reward"}


def rows_of(drawn: Drawn) -> list[dict[str, Any]]:
    """The rows of a drawn batch, with null for what a host does not know of masked tokens."""
    rows: list[dict[str, Any]] = []
    for y in drawn.responses:
        entropy = [h if m else None for h, m in zip(y.entropy, y.mask, strict=True)]
        rows.append(
            {
                "group": y.group,
                "reward": None if y.reward != y.reward else y.reward,
                "token_ids": y.ids,
                "mask": [int(m) for m in y.mask],
                "entropy": entropy,
                "old_logprob": [None if h is None else -h for h in entropy],
                "boundaries": list(y.starts),
                "evidence": {"continuations": []},
            }
        )
    for row, position, rewards in drawn.entries:
        rows[row]["evidence"]["continuations"].append({"position": position, "rewards": rewards})
    return rows


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    method, chosen = GOLDEN[name]
    came = assign((HERE / f"{name}.in.jsonl").read_bytes().splitlines(keepends=True), method, **chosen)
    expected = [json.loads(line) for line in (HERE / f"{name}.expected.jsonl").read_text().splitlines()]
    for got, want in zip(came, expected, strict=True):
        np.testing.assert_allclose(got["advantage"], want["advantage"], rtol=0, atol=1e-6)
        assert got.get("base") == pytest.approx(want.get("base", got["base"]), abs=1e-6)
        for segment, right in zip(got["segments"], want["segments"], strict=True):
            assert {key: segment[key] for key in right} == pytest.approx(right)
        assert got["method"] == method
        assert got["settings"]["ddof"] == chosen.get("ddof", 1)
        assert max(got["invariants"].values()) < 1e-6
        assert ("weight" in got) == (method == "vineppo")


def test_reads_every_field() -> None:
    lines = as_lines([response(), response(group="p", reward=None, finish="length", boundaries=[0, 1, 3])])
    batch = read([b"\xef\xbb\xbf" + lines[0], b"\r\n", b"  \n", lines[1].replace(b"\n", b"\r\n")])
    rollouts = batch.rollouts
    assert batch.lines == [1, 4]
    assert batch.absent == {}
    assert rollouts.names == ("q", "p")
    assert rollouts.group.tolist() == [0, 1]
    assert rollouts.reward[0] == 1
    assert rollouts.reward[1].isnan()
    assert rollouts.truncated.tolist() == [False, True]
    assert rollouts.text == ("ab\n\ncd", "ab\n\ncd")
    assert rollouts.path == (("root", "left"), ("root", "left"))
    assert rollouts.mask.tolist() == [True, True, True, False] * 2
    expected: dict[str, list[float]] = {
        "token_ids": [5, 6, 7, 8],
        "char_start": [0, 1, 4, 6],
        "old_logprob": [-0.5, -0.25, -1, 0],  # a masked token's value carries no meaning: 0
        "ref_logprob": [-0.5, -0.25, -1, 0],
        "entropy": [0.5, 1, 2, 0],
    }
    for field, values in expected.items():
        assert getattr(rollouts, field).tolist() == values * 2, field
    assert rollouts.boundary is not None
    assert rollouts.boundary.tolist() == [False, False, True, False, True, True, False, True]
    pivots = batch.evidence.continuations
    assert pivots is not None
    assert list(zip(pivots.row.tolist(), pivots.position.tolist(), strict=True)) == [(0, 2), (1, 2)]
    assert pivots.mean.tolist() == [0.5, 0.5]
    assert pivots.count.tolist() == [2, 2]


@settings(max_examples=30)
@given(batches())
def test_reads_what_the_constructor_takes(drawn: Drawn) -> None:
    rollouts, evidence = read(as_lines(rows_of(drawn))).rollouts, drawn.evidence().continuations
    expected = drawn.rollouts()
    for field in ("token_ids", "offsets", "mask", "entropy", "old_logprob", "boundary", "group"):
        assert torch.equal(getattr(rollouts, field), getattr(expected, field)), field
    assert torch.equal(rollouts.reward.nan_to_num(-9), expected.reward.nan_to_num(-9))
    came = read(as_lines(rows_of(drawn))).evidence.continuations
    assert came is not None
    assert evidence is not None
    for field in ("row", "position", "mean", "count"):
        assert torch.equal(getattr(came, field), getattr(evidence, field)), field


def test_only_some_rows_have_a_field() -> None:
    batch = read(as_lines([response(), response(reward=0, entropy=None, text=None, offsets=None, evidence=None)]))
    assert batch.rollouts.entropy is None
    # Both rows list their steps, but a stated answer can be looked for in the first one's text only.
    assert batch.rollouts.text == ("ab\n\ncd", None)
    with pytest.raises(InputError, match="oar_p: text of line 2"):
        interchange.plan(batch, make_method("oar_p"))
    assert batch.evidence.continuations is not None
    assert batch.absent == {"entropy": 2}
    assert read(as_lines([response(evidence={"belief": []})])).evidence.continuations is None
    assert read(as_lines([response(boundaries=None), response()])).absent == {}
    assert read(as_lines([response(boundaries=None, offsets=None), response()])).absent == {"boundaries": 1}


def test_each_row_marks_its_steps_in_its_own_way() -> None:
    # "ab\n\ncd" with tokens at 0, 1, 4, 6: its own text starts a step at token 2, and the list says token 1.
    listed = response(boundaries=[1], text=None, offsets=None)
    rollouts = read(as_lines([response(boundaries=None), listed, response(boundaries=[])])).rollouts
    assert step_positions(rollouts, step_starts, "probepo") == [[2], [1], []]


def entry(**change: Any) -> dict[str, Any]:
    return {"continuations": [{"position": 2, "rewards": [1], **change}]}


@pytest.mark.parametrize(
    ("change", "field", "got"),
    [
        ({"group": None}, "group", "nothing"),
        ({"group": 3}, "group", "3"),
        ({"reward": "1"}, "reward", '"1"'),
        ({"reward": True}, "reward", "true"),
        ({"reward": 10**400}, "reward", "1000"),
        ({"token_ids": None}, "token_ids", "nothing"),
        ({"token_ids": "5 6"}, "token_ids", '"5 6"'),
        ({"token_ids": [5, 6.0, 7, 8]}, "token_ids[1]", "6.0"),
        ({"token_ids": [5, -6, 7, 8]}, "token_ids[1]", "-6"),
        ({"token_ids": [5, 6, 7, 2**63]}, "token_ids[3]", str(2**63)),
        ({"token_ids": [5, 6, 7, True]}, "token_ids[3]", "true"),
        ({"mask": [1, 1, 1]}, "mask", "3 values"),
        ({"mask": [1, 2, 1, 1]}, "mask[1]", "2"),
        ({"entropy": [1, 1, 1, 1, 1]}, "entropy", "5 values"),
        ({"entropy": [1, "2", 1, 1]}, "entropy[1]", '"2"'),
        ({"entropy": [1, None, 1, 1]}, "entropy[1]", "null"),
        ({"entropy": [1, -3, 1, 1]}, "entropy", "-3.0 at line 2, position 1"),
        ({"entropy": 2}, "entropy", "2"),
        ({"old_logprob": []}, "old_logprob", "0 values"),
        ({"old_logprob": [-1, 0.5, -1, -1]}, "old_logprob", "0.5 at line 2, position 1"),
        ({"ref_logprob": [-1, -1e300, -1, -1]}, "ref_logprob", "-inf at line 2, position 1"),
        ({"offsets": [0, 1, 4]}, "offsets", "3 values"),
        ({"offsets": [0, 4, 1, 6]}, "offsets", "1 after 4"),
        ({"offsets": [0, 1, 4, 7]}, "offsets", "7"),
        ({"text": None}, "text", "nothing"),
        ({"text": 5}, "text", "5"),
        ({"finish": "eos"}, "finish", '"eos"'),
        ({"path": "root"}, "path", '"root"'),
        ({"path": [["root"]]}, "path[0]", '["root"]'),
        ({"boundaries": [2, 1]}, "boundaries", "1 after 2"),
        ({"boundaries": [1, 1]}, "boundaries", "1 after 1"),
        ({"boundaries": [1, 4]}, "boundaries", "4"),
        ({"boundaries": [-1]}, "boundaries[0]", "-1"),
        ({"boundaries": 2}, "boundaries", "2"),
        ({"evidence": [1]}, "evidence", "[1]"),
        ({"evidence": {"continuations": {}}}, "evidence.continuations", "{}"),
        ({"evidence": {"continuations": [[2, [1]]]}}, "evidence.continuations[0]", "[2, [1]]"),
        ({"evidence": entry(position=None)}, "evidence.continuations[0].position", "null"),
        ({"evidence": entry(position=-1)}, "evidence.continuations[0].position", "-1"),
        ({"evidence": entry(position=1.5)}, "evidence.continuations[0].position", "1.5"),
        ({"evidence": entry(position=4)}, "evidence.continuations", "position 4"),
        ({"evidence": entry(rewards=None)}, "evidence.continuations[0].rewards", "null"),
        ({"evidence": entry(rewards=1)}, "evidence.continuations[0].rewards", "1"),
        ({"evidence": entry(rewards=[1, "0"])}, "evidence.continuations[0].rewards[1]", '"0"'),
    ],
)
def test_refuses_a_field(change: dict[str, Any], field: str, got: str) -> None:
    with pytest.raises(InputError) as caught:
        read([b"\n", *as_lines([response(**change)])])
    assert caught.value.field.startswith(f"{field} of line 2") or caught.value.field == field
    assert "line 2" in str(caught.value)
    assert str(caught.value.got).startswith(got)
    assert caught.value.expected


def test_reward_must_be_there_but_may_be_null() -> None:
    row = response()
    del row["reward"]
    with pytest.raises(InputError, match="reward of line 1: got nothing"):
        read(as_lines([row]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"group": ', "line 2: got invalid JSON \\(Expecting value at column"),
        (b"[1, 2]", "line 2: got \\[1, 2\\]; expected one JSON object"),
        (b"null", "line 2: got null"),
        (b"true false", "line 2: got invalid JSON"),
        (b'{"reward": NaN}', "reward of line 2: got NaN; expected a number that JSON has, or null"),
        (b'{"note": [0, {"x": -Infinity}]}', r"note\[1\].x of line 2: got -Infinity"),
        (b'{"group": "\xff"}', "line 2: got bytes that are not UTF-8"),
        (b'{"a": ' * 100_000, "line 2: got invalid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "line 2: got invalid JSON"),
    ],
)
def test_refuses_a_line(line: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read([*as_lines([response()]), line])


@pytest.mark.parametrize("lines", [[], [b"\n", b"   \n"]])
def test_refuses_no_rows(lines: list[bytes]) -> None:
    with pytest.raises(InputError, match="the input: got no rows"):
        read(lines)


def test_infinite_rewards_are_refused_by_line() -> None:
    one = as_lines([response()])
    with pytest.raises(InputError, match="reward of line 2: got Infinity"):
        read([*one, one[0].replace(b'"reward": 1.0', b'"reward": 1e999')])
    with pytest.raises(InputError, match=r"evidence.continuations\[0\].rewards\[0\] of line 1: got Infinity"):
        read([one[0].replace(b'"rewards": [1', b'"rewards": [1e999')])


def test_numbers_carried_along_must_fit() -> None:
    lines = [as_lines([response()])[0].replace(b"{", b'{"note": 1e999, ', 1)]
    with pytest.raises(InputError, match="line 1: got a number beyond float64"):
        assign(lines, "grpo")


def test_carries_other_fields_along() -> None:
    extra = {"note": {"deep": [1, None, "é\ud800"]}, "advantage": "old", "big": 2**70, "tiny": 1e-300}
    row = response(**extra, evidence={"continuations": [], "own": [{"conf": 0.1}], "unheard_of": 1})
    (got,) = assign(as_lines([row]), "grpo")
    assert list(got)[: len(row)] == list(row)
    assert {**got, "advantage": "old"} == {
        **row, "base": 0.0, "segments": [], "invariants": {"conserved": 0.0}, "method": "grpo",
        "settings": {"ddof": 1, "epsilon": 1e-4},
    }  # fmt: skip
    assert got["advantage"] == [0.0] * 4


def test_unmeasured_values_are_null() -> None:
    # The prompt was not measured, so VinePPO's first segment has no value.
    row = response(evidence={"continuations": [{"position": 2, "rewards": [1, 0]}]})
    (got,) = assign(as_lines([row]), "vineppo")
    assert [s["raw"] for s in got["segments"]] == [None, 0.5]
    assert got["advantage"] == [0.0, 0.0, 0.5, 0.0]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_float32_round_trip(values: list[float]) -> None:
    tensor = torch.tensor([*values, -0.0, 0.1], dtype=torch.float32)
    text = json.dumps(_shortest(tensor))
    back = np.array(json.loads(text), dtype=np.float32)
    assert back.tobytes() == tensor.numpy().tobytes()
    for shown, value in zip(json.loads(text), tensor.numpy(), strict=True):
        assert len(repr(shown).rstrip("0").rstrip(".")) <= len(repr(float(value)))
    assert text.endswith("-0.0, 0.1]")


def test_nan_becomes_null() -> None:
    assert _shortest(torch.tensor([float("nan"), float("inf"), 1.0])) == [None, None, 1.0]


@pytest.mark.parametrize("method", ["grpo", "rloo", "opo", "reinforce_pp", "probepo"])
@settings(max_examples=30)
@given(batches(), st.randoms(use_true_random=False))
def test_shuffled_lines_give_shuffled_credit(method: str, drawn: Drawn, chance: random.Random) -> None:
    lines = as_lines(rows_of(drawn))
    order = list(range(len(lines)))
    chance.shuffle(order)
    straight, shuffled = assign(lines, method), assign([lines[i] for i in order], method)
    for place, i in enumerate(order):
        np.testing.assert_allclose(shuffled[place]["advantage"], straight[i]["advantage"], rtol=1e-5, atol=1e-6)
        assert shuffled[place]["token_ids"] == straight[i]["token_ids"]
        assert [s["start"] for s in shuffled[place]["segments"]] == [s["start"] for s in straight[i]["segments"]]


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "probepo"])
@settings(max_examples=30)
@given(batches())
def test_a_group_alone_is_that_group_in_the_batch(method: str, drawn: Drawn) -> None:
    rows = rows_of(drawn)
    together = assign(as_lines(rows), method)
    for group in {row["group"] for row in rows}:
        alone = assign(as_lines([row for row in rows if row["group"] == group]), method)
        for got, want in zip(alone, [row for row in together if row["group"] == group], strict=True):
            np.testing.assert_allclose(got["advantage"], want["advantage"], rtol=1e-5, atol=1e-6)


# ---- what a method needs ----------------------------------------------------------------------------------------


def pair(**change: Any) -> list[bytes]:
    """Two responses of a group with different rewards; the second one is changed."""
    return as_lines([response(), response(**{"reward": 0, **change})])


def test_only_what_is_needed() -> None:
    bare = {f: None for f in ("entropy", "boundaries", "text", "offsets", "old_logprob", "ref_logprob")}
    lines = as_lines([response(**bare), response(**bare, reward=0)])
    assert len(assign(lines, "probepo")) == 2
    assert plan(pair(evidence=None), "probepo", window=1, min_gap=1)
    assert plan(pair(entropy=None, boundaries=None, text=None, offsets=None), "probepo", placement="random")
    assert plan(pair(), "grpo") == []


@pytest.mark.parametrize(
    ("change", "method", "message"),
    [
        ({"entropy": None}, "probepo", "probepo: entropy of line 2"),
        ({"boundaries": None, "text": None, "offsets": None}, "probepo", "probepo: boundaries of line 2"),
        ({"boundaries": None, "text": None, "offsets": None}, "vineppo", "vineppo: boundaries of line 2"),
    ],
)
def test_plan_names_what_is_missing(change: dict[str, Any], method: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(pair(**change), method)


def test_text_without_offsets_cannot_be_cut() -> None:
    with pytest.raises(InputError, match=r"probepo: boundaries of line 1.*`text` with `offsets`"):
        plan(as_lines([response(boundaries=None, offsets=None), response(reward=0, boundaries=None)]), "probepo")


def test_probepo_without_evidence_is_grpo_only_where_it_says_so() -> None:
    grpo = [row["advantage"] for row in assign(pair(evidence=None), "grpo")]
    none = as_lines([response(evidence=None), response(reward=0, evidence=None)])
    with pytest.raises(InputError, match=r"probepo: evidence.continuations of line 1"):
        assign(none, "probepo")
    assert [row["advantage"] for row in assign(none, "probepo", alpha=0)] == grpo
    # K = 0, said explicitly by one row.
    empty = as_lines([response(evidence=None), response(reward=0, evidence={"continuations": []})])
    assert [row["advantage"] for row in assign(empty, "probepo")] == grpo


@pytest.mark.parametrize("evidence", [None, {"continuations": []}, {"belief": []}])
def test_vineppo_names_a_scored_row_without_continuations(evidence: Any) -> None:
    with pytest.raises(InputError, match=r"vineppo: evidence.continuations of line 2: got none"):
        assign(pair(evidence=evidence), "vineppo")
    with pytest.raises(InputError, match=r"vineppo: evidence.continuations of line 1: got none"):
        assign(as_lines([response(evidence=evidence)]), "vineppo")
    # A row that the verifier abstained on needs none.
    assert assign(pair(evidence=evidence, reward=None), "vineppo")[1]["advantage"] == [0.0] * 4


# ---- plan -------------------------------------------------------------------------------------------------------


def steps(ids: list[int], reward: float, **change: Any) -> dict[str, Any]:
    """A response of 8 tokens with boundaries at 0, 2, 4 and 6; the entropy falls along it."""
    row = {"group": "q", "reward": reward, "token_ids": ids, "boundaries": [0, 2, 4, 6]}
    return {**row, "entropy": [4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5], **change}


def test_plan_folds_identical_prefixes() -> None:
    rows = [steps([1, 2, 3, 4, 5, 6, 7, 8], 1), steps([1, 2, 9, 9, 9, 9, 9, 9], 0)]
    lines = as_lines(rows)
    chosen = {"samples": 2, "budget": 4, "shortlist": 1, "window": 2, "min_gap": 1}
    both = {"samples": 2, "kind": "continuations"}
    # Scores are the higher of two entropies from the boundary on: 3, 2, 1 for both rows; [1, 2] is shared.
    assert plan([lines[0], b"\n", lines[1]], "probepo", **chosen) == [
        {"group": "q", "row": 0, "position": 2, **both, "score": 3.0, "shared_with": [{"row": 1, "position": 2}]},
        {"group": "q", "row": 0, "position": 4, **both, "score": 2.0, "shared_with": []},
    ]  # fmt: skip
    # VinePPO asks at the query and at every boundary; it ranks nothing, and the query is everyone's.
    asked = plan(lines, "vineppo", samples=3)
    assert [(r["row"], r["position"]) for r in asked] == [(0, 0), (0, 2), (0, 4), (0, 6), (1, 4), (1, 6)]
    assert asked[0]["shared_with"] == [{"row": 1, "position": 0}]
    assert all("score" not in r and r["samples"] == 3 for r in asked)


def test_plan_finds_boundaries_in_text() -> None:
    text = "Step 1 a\n\nStep 2 b\n\nStep 3 c"
    marked = [0, 7, 10, 17, 20, 27]  # a token at each step's start and at its letter
    row = {"group": "q", "reward": 1, "token_ids": [1, 2, 3, 4, 5, 6], "text": text, "offsets": marked}
    lines = as_lines([{**row, "entropy": [1] * 6}, {**row, "entropy": [2] * 6, "reward": 0, "group": "q"}])
    asked = plan(lines, "probepo", window=1, min_gap=1, shortlist=1, budget=40, samples=8)
    assert [(r["row"], r["position"]) for r in asked] == [(1, 2), (1, 4)]
    assert [r["shared_with"] for r in asked] == [[{"row": 0, "position": p}] for p in (2, 4)]


def test_plan_second_wave() -> None:
    wanted = {"allocation": "neyman", "samples": 8, "budget": 16, "pilot": 3}
    wanted |= {"shortlist": 1, "window": 2, "min_gap": 1}
    rows = [steps([1, 2, 3, 4, 5, 6, 7, 8], 1), steps([9] * 8, 0)]
    first = plan(as_lines(rows), "probepo", **wanted)
    assert [(r["row"], r["position"], r["samples"]) for r in first] == [(0, 2, 3), (1, 2, 3)]
    # The pilot: 1 of 3 right at one pivot, 3 of 3 at the other.
    for row, rewards in zip(rows, ([1, 0, 0], [1, 1, 1]), strict=True):
        row["evidence"] = {"continuations": [{"position": 2, "rewards": rewards}]}
    # p = (1+1)/5 and (3+1)/5, √(p(1−p)) = .490 and .4, equal weights: shares .551 and .449 of 2·8 = 16 are 8.81
    # and 7.19, by largest remainder 9 and 7, of which 3 each are spent.
    second = plan(as_lines(rows), "probepo", **wanted)
    assert [(r["row"], r["position"], r["samples"]) for r in second] == [(0, 2, 6), (1, 2, 4)]
    # Uniform allocation has no second wave: evidence does not change what it asks.
    uniform = {**wanted, "allocation": "uniform"}
    assert [r["samples"] for r in plan(as_lines(rows), "probepo", **uniform)] == [8, 8]


def test_singletons() -> None:
    rows = [response(group="a"), response(group="b"), response(group="b", reward=None), response(group="c", reward=0)]
    rows += [response(group="c"), response(group="d", reward=None)]
    assert interchange.singletons(read([b"\n", *as_lines(rows)])) == [2, 3]
