"""`apportion compare-credit`: real runs of the embedded policy under several methods, and a belief that was recorded.

Planted faults seen caught: continuations of another budget, of another group's prompt, or fewer than asked for; a
belief under another cue; a base with ε added twice; digests without the model, its weights or the record; the run's
own settings forgotten, its credit assigned anew; shared passes that nobody is charged for; trees without paths and cues
without tokens let through; a result that was cut short; new continuations left out; what was reused called measured; a
checkpoint before RUN/model.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from apportion.cli import app
from apportion.compare import store
from apportion.compare.opened import Opened
from apportion.compare.recorded import Held, host_base, read
from apportion.compare.source import weights_of
from apportion.credit.registry import make_method
from apportion.errors import InputError
from apportion.groups import grpo_base
from apportion.measure.evidence import Belief, Evidence
from apportion.measure.plan import BeliefJob, Job
from apportion.records import RunFolder, credit_rows, rollout_rows
from apportion.report.compared import Compared
from apportion.rollouts import Rollouts
from apportion.train.prepare import prepare
from apportion.train.run import train
from apportion.train.settings import load_config

QUICK = {
    "run.steps": 1, "run.threads": 1, "run.evaluate_samples": 0, "data.operations": 3, "data.count": 64,
    "trainer.per_device_train_batch_size": 16, "trainer.gradient_accumulation_steps": 1, "trainer.num_generations": 4,
}  # fmt: skip


def trained(folder: Path, **settings: Any) -> Path:
    train(prepare(load_config(None, {**QUICK, "run.folder": str(folder), **settings})))
    return folder


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of ProbePO, with continuations in its record."""
    settings = {"method.budget": 8, "method.samples": 2, "method.min_gap": 4}
    return trained(tmp_path_factory.mktemp("runs") / "probepo", **settings)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of GRPO, whose record has no log-probabilities, no entropies and no measurement."""
    return trained(tmp_path_factory.mktemp("runs") / "grpo", **{"method.name": "grpo"})


@pytest.fixture
def run(probed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(probed, tmp_path / "run")


def command(run: Path, methods: str, *arguments: object) -> Result:
    words = ["compare-credit", str(run), "--methods", methods, *map(str, arguments)]
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


def done(run: Path, methods: str, *arguments: object) -> Result:
    result = command(run, methods, *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def told(run: Path, name: str, step: int = 1) -> dict[str, Any]:
    entry = store.about(run, name, step)
    assert entry is not None
    return entry


def credit(run: Path, name: str) -> list[list[float]]:
    return [row["advantage"] for row in store.method_folder(run, name).read("credit", 1)]


class Counted:
    """How many continuations and readings a model was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[Any] = []
        for name in ("continued", "readings"):
            monkeypatch.setattr(Opened, name, self._counting(getattr(Opened, name)))

    def _counting(self, function: Any) -> Any:
        def counted(opened: Opened, rollouts: Rollouts, jobs: Any, *rest: Any) -> Any:
            self.jobs += jobs
            return function(opened, rollouts, jobs, *rest)

        return counted


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


class TestResults:
    def test_the_runs_own_credit_is_kept_bit_for_bit_and_needs_no_model(self, run):
        shutil.rmtree(run / "model")
        shutil.rmtree(run / "checkpoints")
        result = done(run, "probepo,grpo")
        rows = RunFolder(run).read("credit", 1)
        assert store.method_folder(run, "probepo").read("credit", 1) == rows
        # Read back and assigned again, the record makes the same credit: nothing of it was lost on the way.
        assert told(run, "probepo")["reproduced"] is True and "warning" not in result.output
        assert told(run, "probepo")["provenance"] == "recorded" and told(run, "grpo")["provenance"] == "assigned"
        base = [(row["base"], len(row["advantage"])) for row in rows]
        assert credit(run, "grpo") == [[b] * n for b, n in base]
        page = (run / "page.html").read_text()
        assert '"compare":{"step":1,"methods":["probepo","grpo"]}' in page and 'id="compare-1-row-0"' in page

    def test_other_settings_of_the_runs_method_reuse_its_measurements(self, run, asked):
        done(run, "probepo,grpo", "--set", "probepo.alpha=1")
        entry = told(run, "probepo")
        assert entry["provenance"] == "assigned" and asked.jobs == []
        assert entry["settings"]["alpha"] == 1 and entry["settings"]["budget"] == 8
        assert entry["states"] == {"reused": len(RunFolder(run).read("evidence", 1)), "measured": 0}
        # A_t = A_base + α·D̃_t: the distance from the base doubles with α = 1 in place of the run's .5.
        rows = RunFolder(run).read("credit", 1)
        for row, doubled in zip(rows, credit(run, "probepo"), strict=True):
            for a, b in zip(row["advantage"], doubled, strict=True):
                assert b - row["base"] == pytest.approx(2 * (a - row["base"]), abs=1e-5)

    def test_what_another_method_asks_is_taken_from_the_record_or_measured(self, run, asked):
        result = done(run, "probepo,vineppo", "--set", "vineppo.samples=2")
        entry, evidence = told(run, "vineppo"), store.method_folder(run, "vineppo").read("evidence", 1)
        rollouts = RunFolder(run).read("rollouts", 1)
        assert entry["model"] == "RUN/model" and 0 < entry["gap"]["mean"] < 0.1
        assert entry["states"]["reused"] > 0 and entry["cost"]["generated"] > 0
        assert entry["states"]["measured"] == sum(job.samples for job in asked.jobs)
        # By the definition: a state's value is the mean reward of its continuations, wherever they were noted.
        values: dict[tuple[Any, ...], list[float]] = {}
        for e in evidence:
            r = rollouts[e["row"]]
            values.setdefault((r["group"], *r["token_ids"][: e["position"]]), []).append(e["reward"])
        assert all(len(rewards) == 2 for rewards in values.values())
        for r, c in zip(rollouts, store.method_folder(run, "vineppo").read("credit", 1), strict=True):
            at = [values[r["group"], *r["token_ids"][: int(s["start"])]] for s in c["segments"]]
            means = [sum(rewards) / 2 for rewards in at] + [r["reward"]]
            for s, here, after in zip(c["segments"], means, means[1:], strict=False):
                for a in c["advantage"][int(s["start"]) : int(s["end"])]:
                    assert a == pytest.approx(after - here, abs=1e-6)
        assert "measured with RUN/model" in result.output and "from the record" in result.output
        # What is in the record was sampled by the policy that wrote the responses.
        recorded = {(e["key"], e["m"], tuple(e["token_ids"])) for e in RunFolder(run).read("evidence", 1)}
        reused = [e for e in evidence if (e["key"], e["m"], tuple(e["token_ids"])) in recorded]
        assert len(reused) == entry["states"]["reused"]

    def test_a_method_needs_no_model_for_what_the_verifier_and_the_record_know(self, run, monkeypatch):
        def refuse(*_: Any) -> Any:
            raise AssertionError("a model was loaded")

        monkeypatch.setattr("apportion.compare.opened.open_bench", refuse)
        done(run, "cw_grpo,step_verified,grpo")
        assert told(run, "cw_grpo")["provenance"] == "assigned"
        entry = told(run, "step_verified")
        assert (entry["provenance"], entry["model"], entry["gap"]) == ("measured", None, None)

    def test_the_policy_that_wrote_the_responses_has_no_gap(self, run):
        done(run, "grpo,vineppo", "--model", "embedded", "--set", "vineppo.samples=1")
        assert told(run, "vineppo")["gap"]["mean"] < 1e-5

    def test_what_a_record_of_grpo_lacks_is_read_with_the_model(self, plain, tmp_path):
        run = shutil.copytree(plain, tmp_path / "run")
        result = done(run, "grpo,cw_grpo,ep_grpo,avspo+cw_grpo", "--set", "avspo+cw_grpo.avspo.threshold=0.9")
        assert told(run, "cw_grpo")["statistics"] == ["old_logprob"]
        assert sorted(told(run, "ep_grpo")["statistics"]) == ["entropy", "old_logprob", "ref_logprob"]
        assert told(run, "cw_grpo")["gap"] is None and "gap unknown" in result.output
        costs = [told(run, name)["cost"]["forward"] for name in ("cw_grpo", "ep_grpo", "avspo+cw_grpo")]
        assert costs[1] == 2 * costs[0] == 2 * costs[2] > 0
        assert told(run, "avspo+cw_grpo")["settings"]["avspo"]["threshold"] == 0.9


class TestGoingOn:
    def test_a_result_is_kept_for_the_same_settings_model_and_record_only(self, run, asked):
        words = ("vineppo,grpo", "--set")
        done(run, *words, "vineppo.samples=1")
        first = len(asked.jobs)
        assert first > 0
        done(run, *words, "vineppo.samples=1")
        assert len(asked.jobs) == first
        done(run, *words, "vineppo.samples=3")
        second = len(asked.jobs)
        assert second > first
        weights = load_file(run / "model" / "model.safetensors")
        name = next(iter(weights))
        save_file({**weights, name: weights[name] + 1e-3}, run / "model" / "model.safetensors", {"format": "pt"})
        done(run, *words, "vineppo.samples=3")
        third = len(asked.jobs)
        assert third > second
        rows = RunFolder(run).read("credit", 1)
        RunFolder(run).write("credit", 1, [{**row, "mean": row["mean"] + 0.25} for row in rows])
        assert Compared.open(run) is None
        done(run, *words, "vineppo.samples=3")
        assert len(asked.jobs) > third

    def test_ctrl_c_keeps_the_methods_that_are_done(self, run, asked, monkeypatch):
        whole = Opened.continued

        def interrupted(*_: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(Opened, "continued", interrupted)
        words = ("cw_grpo,step_verified,vineppo", "--set", "vineppo.samples=1")
        result = command(run, *words)
        assert result.exit_code == 130 and "stopped" in result.output
        assert store.about(run, "step_verified", 1) is not None and store.about(run, "vineppo", 1) is None
        kept = (run / "compare" / "step_verified" / "credit" / "step-000001.parquet").stat().st_mtime_ns
        monkeypatch.setattr(Opened, "continued", whole)
        done(run, *words)
        assert (run / "compare" / "step_verified" / "credit" / "step-000001.parquet").stat().st_mtime_ns == kept
        assert Compared.open(run).index()["methods"] == ["cw_grpo", "step_verified", "vineppo"]

    def test_a_result_that_was_cut_short_counts_for_nothing(self, run, monkeypatch):
        done(run, "grpo,cw_grpo")

        def broken(self: RunFolder, kind: str, step: int, rows: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(RunFolder, "write", broken)
        with pytest.raises(KeyboardInterrupt):
            store.keep(run, "grpo", 1, [], [], {"digest": "other"})
        assert store.about(run, "grpo", 1) is None


class TestRefusals:
    def refused(self, run: Path, methods: str, *arguments: object) -> str:
        result = command(run, methods, *arguments)
        assert result.exit_code == 2, result.output
        assert result.output.count("\n") == 1
        assert not (run / "compare").exists()
        return result.output

    def test_all_that_cannot_be_had_is_named_at_once(self, run):
        words = self.refused(run, "treepo,grpo,spo_tree,spae,grpo_vps,vineppo")
        for name in ("treepo", "spo_tree", "spae", "grpo_vps"):
            assert f"{name} (" in words, words
        assert "path" in words and "spae.cue" in words and "vineppo (" not in words

    def test_without_a_model_only_what_needs_one_is_refused(self, run):
        shutil.rmtree(run / "model")
        shutil.rmtree(run / "checkpoints")
        words = self.refused(run, "grpo,vineppo,cw_grpo")
        assert "vineppo (" in words and "cw_grpo (" not in words and "--model" in words

    def test_without_a_configuration_only_what_needs_one_is_refused(self, run):
        (run / "config.toml").unlink()
        words = self.refused(run, "grpo,vineppo,step_verified")
        assert "vineppo (" in words and "step_verified (" in words and "config.toml" in words

    def test_prompts_that_are_not_of_the_runs_data(self, run):
        text = (run / "config.toml").read_text()
        (run / "config.toml").write_text(re.sub("operations = 3", "operations = 4", text))
        assert "no row for" in self.refused(run, "grpo,vineppo")

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("grpo",), "two or more"), (("grpo,grpo",), "two or more"), (("",), "two or more"),
            (("grpo,vinepo",), "did you mean 'vineppo'"), (("grpo,vineppo", "--step", "7"), "a recorded step"),
            (("grpo,vineppo", "--set", "vineppo.sample=3"), "did you mean 'samples'"),
            (("grpo,vineppo", "--set", "probepo.alpha=1"), "METHOD.KEY=VALUE"),
            (("grpo,vineppo", "--set", "samples=1"), "METHOD.KEY=VALUE"),
            (("grpo,vineppo", "--set", "vineppo.samples=0"), "vineppo.samples"),
            (("grpo,vineppo", "--model", "/nowhere"), "--model"),
            (("grpo,cw_grpo+probepo",), "cannot follow"),
        ],
    )  # fmt: skip
    def test_bad_words_are_one_line(self, run, arguments, words):
        assert words in self.refused(run, *arguments)

    def test_the_newest_whole_checkpoint_stands_in_for_the_model(self, run):
        shutil.rmtree(run / "model")
        assert weights_of(run, None).name == "RUN/checkpoints/checkpoint-1"
        # An adapter alone is no model.
        (run / "checkpoints" / "checkpoint-1" / "config.json").unlink()
        with pytest.raises(InputError, match="--model"):
            weights_of(run, None)


class TestRecord:
    def test_the_base_is_the_trainers_own_bit_for_bit(self, probed):
        step = read(RunFolder(probed), 1)
        live = step.base.live
        assert live.any()
        # ProbePO spreads the trainer's base as it came, so the record has it.
        recorded = torch.tensor([row["base"] for row in step.credit], dtype=torch.float32)
        assert torch.equal(step.base.advantage, recorded)

    def test_the_base_in_numbers(self):
        rollouts = Rollouts.from_lists([[1]] * 5, ["a"] * 5, [1.0, 0.0, 0.0, 0.0, None])
        # σ of (1, 0, 0, 0) is .5, and TRL adds 1e-4.
        base = host_base(rollouts, [{"mean": 0.25, "scale": 0.5001}] * 5)
        assert base.advantage.tolist() == pytest.approx([1.4997, -0.4999, -0.4999, -0.4999, 0.0], abs=1e-4)
        assert base.live.tolist() == [True] * 4 + [False]

    def test_a_state_is_the_same_wherever_it_was_noted(self, probed):
        step = read(RunFolder(probed), 1)
        held, probepo = Held(step), step.own
        row, position = next(
            (e["row"], e["position"]) for e in step.recorded.evidence if e["kind"] == "continuations"
        )  # fmt: skip
        (found,) = held.continuations(probepo, [Job(row, position, 2, ((row, position),))])
        assert [e["m"] for e in found] == [0, 1]
        # More than were sampled, or others, are not there; nor is a state with another budget.
        assert held.continuations(probepo, [Job(row, position, 3, ((row, position),))]) == [None]
        assert held.continuations(probepo, [Job(row, position, 1, ((row, position),))], first=2) == [None]
        fresh = make_method("vineppo", {"fresh_budget": 64})
        assert held.continuations(fresh, [Job(row, position, 2, ((row, position),))]) == [None]
        # A response of the group with the same tokens before the state, and one of another group with them.
        start = int(step.rollouts.offsets[row])
        ids = step.rollouts.token_ids[start : start + position + 1].tolist()
        twins = Rollouts.from_lists([ids, ids, ids], ["here", "other", "here"], [1.0, 0.0, 0.0])
        moved = replace(step, rollouts=twins, recorded=replace(step.recorded, evidence=[
            {**e, "row": 0} for e in step.recorded.evidence if (e["row"], e["position"]) == (row, position)
        ]), own=make_method("vineppo"))  # fmt: skip
        jobs = [Job(i, position, 2, ((i, position),)) for i in range(3)]
        here, other, twin = Held(moved).continuations(make_method("vineppo"), jobs)
        assert here is not None and other is None
        assert [{**e, "row": 0} for e in twin] == here

    def test_a_belief_is_reused_where_the_same_one_was_asked_for(self, tmp_path):
        texts = ["1+1=2 #2", "1+1=3 #3"]
        ids = [[ord(c) for c in text] for text in texts]
        rollouts = Rollouts.from_lists(
            ids, ["a", "a"], [1.0, 0.0], entropy=[[float(t % 5 == 2) for t in range(8)]] * 2, text=tuple(texts),
            char_start=[list(range(8))] * 2, prompt_ids=(torch.tensor([1, 2]),),
        )  # fmt: skip
        method, base = make_method("grpo_vps", {"answer_pattern": "#([0-9])", "per_segment": 1, "cue": "#"}), None
        base = grpo_base(rollouts)
        jobs = method.plan(rollouts, base)
        assert jobs and all(isinstance(job, BeliefJob) for job in jobs)
        entries = [(j.row, p, -0.1 * (p + 1)) for j in jobs for p in j.positions]
        made = method.assign(rollouts, Evidence(belief=Belief.from_entries(rollouts, entries, [0, 1])), base)
        folder = RunFolder(tmp_path / "run")
        folder.log({"step": 1})
        folder.write("rollouts", 1, rollout_rows(rollouts, ["p", "p"], ["2", "2"]))
        folder.write("evidence", 1, [
            {"key": "k", "kind": "belief", "group": "a", "row": row, "position": p, "values": [value]}
            for row, p, value in entries
        ])  # fmt: skip
        folder.write("credit", 1, credit_rows(rollouts, made, base.mean.tolist(), base.scale.tolist()))
        held = Held(read(folder, 1))
        assert held.reading(jobs[0]) == [value for row, _, value in entries if row == jobs[0].row]
        fewer = replace(jobs[0], positions=jobs[0].positions[:1])
        assert held.reading(fewer) == [entries[0][2]]
        for other in (
            replace(jobs[0], cue="?"), replace(jobs[0], per_token=True), replace(jobs[0], positions=(0, 1, 2, 3, 4)),
        ):  # fmt: skip
            assert held.reading(other) is None
        done(folder.path, "grpo_vps,grpo", "--set", "grpo_vps.alpha=2.4")
        # A = (r − μ) + α·ΔC, and α is twice the run's 1.2.
        for row, before, after in zip((0, 1), folder.read("credit", 1), credit(folder.path, "grpo_vps"), strict=True):
            plain = (0.5, -0.5)[row]
            for a, b in zip(before["advantage"], after, strict=True):
                assert b - plain == pytest.approx(2 * (a - plain), abs=1e-6)
        entry = told(folder.path, "grpo_vps")
        assert (entry["provenance"], entry["model"], entry["states"]["reused"]) == ("assigned", None, len(jobs))


def test_the_table_names_every_method_and_what_it_took(run):
    output = done(run, "probepo,cw_grpo,grpo").output
    for words in ("as trained with", "from the record", "rank correlation", "Where ranks differ most", "Page: "):
        assert words in output, words
    chunk = Compared.open(run).chunk("compare-1")
    json.dumps(chunk, allow_nan=False)
    assert [each["name"] for each in chunk["methods"]] == ["probepo", "cw_grpo", "grpo"]
