"""verl's dumps and prime-rl's rollouts, in each shape that their writers have published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from foreign_records import checked, dump, episode, node, rollout, talk, trace, write_lines

from apportion.errors import InputError
from apportion.report.foreign.text import PIECES
from apportion.report.source import open_source

# r = 1, 0, 0, 0: mean 1/4, deviation of the sample 1/2; (3/4)/(1/2 + 1e-4) and (-1/4)/(1/2 + 1e-4).
WON, LOST = 1.49970006, -0.49990002


# --- verl ---------------------------------------------------------------------------------------------------


def test_verls_scores_get_grpos_base_in_groups_of_one_prompt(tmp_path: Path) -> None:
    # The second prompt's answers all score 0, and lie between those of the first.
    rows = [
        dump("6*7?", "it is 42", 1.0, acc=True), dump("1+1?", "3", 0.0), dump("6*7?", "41", 0.0),
        dump("6*7?", "", 0.0), dump("1+1?", "4", 0.0), dump("6*7?", "43", 0.0),
    ]  # fmt: skip
    write_lines(tmp_path / "7.jsonl", rows)
    write_lines(tmp_path / "12.jsonl", rows[:1])
    source = open_source(tmp_path)
    assert source.steps() == [7, 12] == source.recorded_steps()
    view = checked(source, 7)
    credit = source.read("credit", 7)
    assert [row["base"] for row in credit] == pytest.approx([WON, 0, LOST, LOST, 0, LOST])
    assert credit[0]["advantage"] == pytest.approx([WON] * 3) and credit[0]["mean"] == 0.25
    assert credit[0]["scale"] == pytest.approx(0.5001)
    assert view.summary["method"] == "verl: grpo (from recorded rewards)"
    assert view.summary["settings"]["tokens"] == PIECES
    assert [g["rows"] for g in view.summary["groups"]] == [[0, 2, 3, 5], [1, 4]]
    assert [g["collapsed"] for g in view.summary["groups"]] == [False, True]
    first = source.read("rollouts", 7)[0]
    assert (first["gold"], first["verdict"], first["finish"], first["entropy"]) == ("42", "correct", None, None)
    assert view.detail(0)["tokens"]["text"] == ["it", " is", " 42"]
    # One of two groups has equal rewards; words: 3, 1, 1, 0, 1, 1.
    assert source.metrics()[0] == {
        "step": 7, "reward": pytest.approx(1 / 6), "credit/zero_variance": 0.5,
        "completions/mean_length": pytest.approx(7 / 6),
    }  # fmt: skip


def test_verls_uid_keeps_two_groups_of_one_prompt_apart(tmp_path: Path) -> None:
    rows = [dump("p", "a", score, uid=f"{name}_{k}_0") for name in ("u_1", "u_2") for k, score in enumerate((1, 0))]
    path = write_lines(tmp_path / "7.jsonl", rows)
    assert [r["group"] for r in open_source(path).read("rollouts", 7)] == ["u_1", "u_1", "u_2", "u_2"]
    # Where one line has no such uid, none of them counts.
    write_lines(path, [*rows, dump("p", "a", 0.0, uid="u")])
    assert {r["group"] for r in open_source(path).read("rollouts", 7)} == {"prompt-0"}


def test_an_abstaining_verl_score_is_no_reward(tmp_path: Path) -> None:
    write_lines(tmp_path / "7.jsonl", [dump("p", "a", s) for s in (1.0, float("nan"), None, 0.0, 0.0, 0.0)])
    source = open_source(tmp_path)
    checked(source, 7)
    assert [r["verdict"] for r in source.read("rollouts", 7)][1:3] == ["abstain", "abstain"]
    assert [r["base"] for r in source.read("credit", 7)] == pytest.approx([WON, 0, 0, LOST, LOST, LOST])
    assert source.metrics()[0]["reward"] == 0.25
    write_lines(tmp_path / "8.jsonl", [dump("p", "a", None)])
    assert source.read("credit", 8)[0]["mean"] is None


def test_a_single_dump_may_hold_several_steps(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "all.jsonl", [dump("p", "a", 1.0), {**dump("p", "b", 0.0), "step": 9}])
    assert open_source(path).steps() == [7, 9]
    # Without the field, the file's own number.
    row = {k: v for k, v in dump("p", "a", 1.0).items() if k != "step"}
    assert open_source(write_lines(tmp_path / "val_31.jsonl", [row])).steps() == [31]


def test_equal_beginnings_have_equal_piece_numbers_and_no_others(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "7.jsonl", [dump("p", "so it is", 1.0), dump("p", "so it was", 0.0), dump("q", "is so", 0.0)]
    )
    ids = [r["token_ids"] for r in open_source(tmp_path).read("rollouts", 7)]
    assert ids[0][:2] == ids[1][:2] and ids[0][2] != ids[1][2]
    # " is" and "is" differ, as tokens of them would.
    assert not {*ids[2]} & {*ids[0], *ids[1]}


# --- prime-rl -------------------------------------------------------------------------------------------------


def test_rollouts_of_verifiers_0(tmp_path: Path) -> None:
    rows = [
        rollout(0, "It is 42.", 1.0), rollout(0, "41", 0.0, is_truncated=True), rollout(1, "42", 1.0),
        rollout(0, "", 0.0, error={"error": "Timeout"}), rollout(0, "40", 0.0), rollout(0, "39", 0.0),
    ]  # fmt: skip
    write_lines(tmp_path / "run_default" / "rollouts" / "step_3" / "train_rollouts.jsonl", rows)
    source = open_source(tmp_path)
    assert source.steps() == [3]
    view = checked(source, 3)
    rollouts = source.read("rollouts", 3)
    assert [r["group"] for r in rollouts] == ["example-0", "example-0", "example-1", *["example-0"] * 3]
    # What failed has no reward and is left out of its group: 1, 0, 0, 0 are left.
    assert [r["verdict"] for r in rollouts] == ["correct", "wrong", "correct", "abstain", "wrong", "wrong"]
    assert [r["base"] for r in source.read("credit", 3)] == pytest.approx([WON, LOST, 0, 0, LOST, LOST])
    assert [r["finish"] for r in rollouts[:2]] == ["stop", "length"]
    assert rollouts[0]["prompt"] == "user: What is 6 * 7?" and rollouts[0]["gold"] == "42"
    assert view.detail(0)["tokens"]["text"] == ["It", " is", " 42."]


def test_recorded_advantages_of_prime_rl_are_shown_as_they_are(tmp_path: Path) -> None:
    rows = [rollout(0, "a b", 1.0, advantage=0.75), rollout(0, "c", 0.0, advantage=-0.25), rollout(0, "d", 0.0)]
    path = write_lines(tmp_path / "step_4" / "train_rollouts.jsonl", rows)
    for opened in (path, tmp_path, path.parent):
        source = open_source(opened)
        assert source.steps() == [4]
        view = checked(source, 4)
        assert view.summary["method"] == "prime-rl: recorded advantages"
        assert [r["advantage"] for r in source.read("credit", 4)] == [[0.75, 0.75], [-0.25], [0.0]]
        assert [r["scale"] for r in source.read("credit", 4)] == [None] * 3
        assert view.summary["counts"] == {"without_advantage": 1}


def test_the_trace_that_was_shipped_takes_the_place_of_its_record_at_arrival(tmp_path: Path) -> None:
    at = tmp_path / "rollouts" / "step_0" / "train"
    arrived = [trace(f"t{k}", talk("4"), {"ok": {"score": 1.0 - k, "weight": 0.5}}) for k in (0, 1)]
    shipped = trace("t1", talk("4"), {"ok": {"score": 0.0, "weight": 0.5}}, advantage=-0.5)
    write_lines(at / "all" / "traces.jsonl", [episode("e0", arrived[:1]), episode("e1", arrived[1:])])
    write_lines(at / "effective" / "traces.jsonl", [episode("e1", [shipped])])
    source = open_source(tmp_path)
    checked(source, 0)
    assert [r["reward"] for r in source.read("rollouts", 0)] == [0.5, 0.0]
    assert [r["base"] for r in source.read("credit", 0)] == [0.0, -0.5]
    assert {r["group"] for r in source.read("rollouts", 0)} == {"group-1"}


def test_what_is_not_trained_on_is_not_shown(tmp_path: Path) -> None:
    judge = trace("judge", talk("ok"), {})
    judge["agent"]["trainable"] = False
    traces = [
        trace("t", talk("4"), {"ok": 1.0, "judge": None}),
        judge,
        trace("eval", talk("4"), {"ok": 1.0}, kind="eval"),
    ]
    failed = {"id": "e2", "ok": False, "errors": [{"type": "TimeoutError"}], "traces": []}
    source = open_source(write_lines(tmp_path / "step_0" / "train_rollouts.jsonl", [episode("e", traces), failed]))
    assert [r["reward"] for r in source.read("rollouts", 0)] == [1.0]


def test_a_trace_of_several_turns_shows_its_last_branch(tmp_path: Path) -> None:
    nodes = [
        node("user", "find it", None, 2), node("assistant", "dropped", 0, 2, 2),
        node("assistant", "let me look", 0, 3, 2), node("tool", "4 hits", 2, 3),
        # Put there by the environment, not sampled.
        node("assistant", "noted", 3, 1), node("assistant", "it is here", 4, 4, 3),
    ]  # fmt: skip
    nodes[2]["message"]["tool_calls"] = [{"id": "c", "type": "function", "name": "grep", "arguments": '{"q": "it"}'}]
    path = write_lines(tmp_path / "t.jsonl", [trace("t", nodes, {"ok": 1.0})])
    source = open_source(path)
    view = checked(source, 0)
    (row,) = source.read("rollouts", 0)
    assert row["prompt"] == "user: find it" and row["gold"] == "4"
    assert row["text"] == (
        'assistant: let me look\ngrep({"q": "it"})\n\ntool: 4 hits\n\nassistant: noted\n\nassistant: it is here'
    )
    texts = view.detail(0)["tokens"]["text"]
    trained = "".join(text for text, ours in zip(texts, row["mask"], strict=True) if ours)
    assert trained == 'let me look\ngrep({"q": "it"})it is here'


def test_credit_that_differs_from_token_to_token_is_shown_on_the_tokens(tmp_path: Path) -> None:
    rows = [
        trace("t0", talk("2 2", advantages=[0.5, -0.25]), {"ok": 1.0}, group_id="g"),
        trace("t1", talk("4", advantages=[0.125, 0.125]), {"ok": 0.0}, group_id="g"),
    ]
    source = open_source(write_lines(tmp_path / "t.jsonl", rows))
    view = checked(source, 0)
    rollouts, credit = source.read("rollouts", 0), source.read("credit", 0)
    # A scaffold token in front of two sampled ones.
    assert rollouts[0]["token_ids"] == [10, 11, 12] and rollouts[0]["mask"] == [False, True, True]
    assert credit[0]["advantage"] == [0.0, 0.5, -0.25] and credit[0]["base"] == 0.125
    assert rollouts[0]["text"] is None and view.detail(0)["tokens"]["text"] == ["⟨10⟩", "⟨11⟩", "⟨12⟩"]
    assert view.detail(0)["tokens"]["logprob"] == [None, -0.5, -0.5]
    # Where all are equal, the text says more than the numbers of its tokens.
    assert rollouts[1]["text"] == "4" and credit[1]["advantage"] == [0.125]


def test_a_stream_is_split_into_steps_by_its_updates(tmp_path: Path) -> None:
    stream = tmp_path / "traces" / "stream"
    episodes = [episode(f"e{k}", [trace(f"t{k}", talk("4"), {"ok": float(k == 0)})], step=k) for k in range(4)]
    write_lines(stream / "00000.jsonl", episodes[:1])
    write_lines(stream / "00001.jsonl", episodes[1:])
    write_lines(tmp_path / "traces" / "stream.index.jsonl", [{"line": 1, "chunk": 0}])
    update = {"version": 1, "info": {"effective": True, "advantage": 0.75, "ship": {"step": 5}}, "branches": []}
    tokens = {"index": 0, "advantages": [0.0] * 6 + [0.25, 0.5]}
    updates = [
        {**update, "trace_id": "t0"},
        {**update, "trace_id": "t1", "info": {"advantage": 9.0, "ship": {"step": 4}}},
        # The newest wins, and its credit of tokens over its scalar.
        {**update, "trace_id": "t1", "info": {"advantage": 0.5, "ship": {"step": 5}}, "branches": [tokens]},
        {**update, "trace_id": "t2", "info": {"advantage": -0.25, "ship": {"step": 5}}},
    ]
    write_lines(tmp_path / "traces" / "annotations" / "orchestrator" / "00000.jsonl", updates)
    for opened in (tmp_path, tmp_path / "traces", stream):
        source = open_source(opened)
        # The last episode was never shipped: it stays where it was dispatched.
        assert source.steps() == [3, 5]
        checked(source, 5)
        assert [r["advantage"] for r in source.read("credit", 5)] == [[0.75], [0.0, 0.25, 0.5], [-0.25]]
        assert [r["base"] for r in source.read("credit", 3)] == [0.0]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"mask": [True]}, "mask of nodes[2] of line 1 of t.jsonl"),
        ({"advantages": [1.0]}, "advantages of nodes[2] of line 1 of t.jsonl"),
        ({"token_ids": [2**31, 1, 2]}, "token_ids of nodes[2] of line 1 of t.jsonl"),
        ({"parent": 2}, "parent of nodes[2] of line 1 of t.jsonl"),
        ({"message": "hello"}, "message of nodes[2] of line 1 of t.jsonl"),
    ],
)
def test_a_broken_node_is_named(tmp_path: Path, change: dict[str, object], field: str) -> None:
    nodes = talk("4", advantages=[1.0, 2.0])
    nodes[2] |= change
    path = write_lines(tmp_path / "t.jsonl", [trace("t", nodes, {"ok": 1.0})])
    with pytest.raises(InputError) as error:
        open_source(path).steps()
    assert error.value.field == field


def test_metrics_are_plain_numbers(tmp_path: Path) -> None:
    write_lines(tmp_path / "step_1" / "train_rollouts.jsonl", [rollout(0, "a", 1.0, error="x")])
    (row,) = open_source(tmp_path).metrics()
    # No reward, no mean of it.
    assert json.loads(json.dumps(row)) == {"step": 1, "credit/zero_variance": 1.0, "completions/mean_length": 1.0}
