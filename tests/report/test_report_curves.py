"""Learning curves from hand-made runs: kinds, intervals, axes, interpolation and thinning, all worked out by hand.

Planted faults seen caught: the normal's quantile, s with n, a degree of freedom too many, Wald's interval, picked
steps, the last step averaged, extrapolation, tokens without probes, an infinite count, one kind for all
folders without a configuration, folders as configuration.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.records import RunFolder
from apportion.report.curves import FEW, POINTS, curves
from apportion.report.intervals import averages, bins, over_seeds, t_quantile, wilson
from apportion.report.kinds import kinds

METRIC = "loss"  # drawn under "more metrics"


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Writes a run folder: rows of metrics, text of config.toml, lines of evaluations.jsonl."""

    def write(
        name: str, rows: Sequence[Mapping[str, Any]], config: str | None = None, evaluations: Sequence[str] = ()
    ) -> RunFolder:
        run = RunFolder(tmp_path / name)
        for row in rows:
            run.log(row)
        if config is not None:
            (run.path / "config.toml").write_text(config)
        if evaluations:
            (run.path / "evaluations.jsonl").write_text("\n".join(evaluations))
        return run

    return write


def config(seed: int = 0, method: str = "probepo", more: str = "", run: str = "") -> str:
    return f'[run]\nfolder = "runs/{seed}"\nseed = {seed}\n{run}\n[method]\nname = "{method}"\n{more}\n'


def curve(found: dict[str, Any], name: str, kind: int = 0) -> dict[str, Any]:
    return next(each for each in found["curves"] if each["name"] == name)["kinds"][kind]


def grid(found: dict[str, Any], name: str, kind: int = 0) -> dict[str, Any]:
    of = next(each for each in found["curves"] if each["name"] == name)["grid"]
    return found["kinds"][kind]["grids"][of]


# --- intervals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freedom", "published"),
    # Two-sided 95 % points of Student's t, as tables print them.
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (7, 2.365), (9, 2.262), (10, 2.228), (15, 2.131),
     (30, 2.042), (60, 2.000), (120, 1.980)],
)  # fmt: skip
def test_students_t_is_the_published_one(freedom: int, published: float) -> None:
    assert t_quantile(freedom) == pytest.approx(published, abs=6e-4)


def test_students_t_has_its_closed_forms() -> None:
    # ν = 1: tan(0.975π − π/2); ν = 2: 2a − 1 = t/√(2 + t²) with a = 0.975.
    assert t_quantile(1) == pytest.approx(math.tan(math.pi * 0.475), rel=1e-12)
    assert t_quantile(2) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), rel=1e-12)
    assert t_quantile(5000) == pytest.approx(1.96, abs=1e-3)


def test_mean_and_interval_of_three_seeds() -> None:
    # 0.4, 0.5, 0.9: mean 0.6, s² = (0.04 + 0.01 + 0.09)/2 = 0.07, half = 4.302653·√(0.07/3).
    half = 4.302653 * math.sqrt(0.07 / 3)
    found = over_seeds(np.array([[0.4], [0.5], [0.9]]))
    assert found["mean"] == [0.6] and found["n"] == [3]
    assert found["low"][0] == pytest.approx(0.6 - half, abs=1e-5)
    assert found["high"][0] == pytest.approx(0.6 + half, abs=5e-5)


def test_one_seed_has_no_interval_and_none_has_no_mean() -> None:
    found = over_seeds(np.array([[0.4, np.nan], [np.nan, np.nan]]))
    assert found == {"mean": [0.4, None], "low": [None, None], "high": [None, None], "n": [1, 0]}


@pytest.mark.parametrize(
    ("successes", "samples", "low", "high"),
    # 0 of 10 and 10 of 10: z²/(n + z²) = 3.8415/13.8415; 5 of 10 and 81 of 263 (Newcombe 1998, table I, method 3).
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (5, 10, 0.23659, 0.76341), (81, 263, 0.2553, 0.3662)],
)
def test_wilsons_interval_is_the_published_one(successes: int, samples: int, low: float, high: float) -> None:
    found = wilson(np.array([successes / samples]), np.array([float(samples)]))
    assert found["low"][0] == pytest.approx(low, abs=5e-5) and found["high"][0] == pytest.approx(high, abs=5e-5)


def test_what_is_no_share_has_no_interval() -> None:
    found = wilson(np.array([1.02, -0.02, 0.5, np.nan]), np.array([10.0, 10.0, 0.0, 10.0]))
    assert found == {"low": [None] * 4, "high": [None] * 4}


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=60), st.integers(2, 20))
def test_bins_keep_the_mean_and_the_last(values: list[float], points: int) -> None:
    starts = bins(len(values), points)
    found = averages(np.array(values), starts)
    sizes = np.diff([*starts, len(values)])
    assert len(found) == min(len(values), points) and found[-1] == values[-1]
    assert max(sizes[:-1], default=1) - min(sizes[:-1], default=1) <= 1
    assert float(found @ sizes) == pytest.approx(math.fsum(values), abs=1e-6)


def test_bins_pass_over_what_is_missing() -> None:
    found = averages(np.array([1.0, np.nan, np.nan, np.nan, 5.0]), np.array([0, 2, 4]))
    assert found.tolist()[0] == 1 and math.isnan(found[1]) and found[2] == 5


# --- kinds ----------------------------------------------------------------------------------------------------------


def labels(*runs: RunFolder) -> list[tuple[str, tuple[int, ...]]]:
    return [(kind.label, kind.runs) for kind in kinds([run.path for run in runs])]


def test_seeds_of_one_configuration_are_one_kind(make: Any) -> None:
    a = make("a", [], None)
    rows = [{"step": 1, "loss": 1.0}]
    a = make("a", rows, config(0, run="threads = 1\nrecord_every = 1", more="seed = 3"))
    b = make("b", rows, config(1, "grpo"))
    c = make("c", rows, config(7, run="threads = 2\ncheckpoint_every = 9", more="seed = 9"))
    assert labels(a, b, c) == [("probepo", (0, 2)), ("grpo", (1,))]


def test_a_longer_budget_is_another_kind(make: Any) -> None:
    # A learning rate's schedule depends on it.
    rows = [{"step": 1}]
    a, b = make("a", rows, config(run="steps = 10")), make("b", rows, config(run="steps = 20"))
    assert labels(a, b) == [("steps 10", (0,)), ("steps 20", (1,))]


def test_labels_name_what_differs(make: Any) -> None:
    rows = [{"step": 1}]
    a = make("a", rows, config(more="alpha = 0.5\nbudget = 4"))
    b = make("b", rows, config(more="alpha = 1\nbudget = 4"))
    c = make("c", rows, config(method="grpo"))
    assert [label for label, _ in labels(a, b)] == ["alpha 0.5", "alpha 1"]
    assert [label for label, _ in labels(a, b, c)] == ["probepo, alpha 0.5", "probepo, alpha 1", "grpo"]
    assert [label for label, _ in labels(a)] == ["probepo"]


def test_labels_of_keys_that_one_has_alone_and_of_equal_last_parts(make: Any) -> None:
    rows = [{"step": 1}]
    a, b = make("a", rows, config(more="x = 1")), make("b", rows, config())
    assert [label for label, _ in labels(a, b)] == ["x 1", "x –"]
    c = make("c", rows, config(more="[data]\nx = 1\n[trainer]\nx = 1"))
    d = make("d", rows, config(more="[data]\nx = 2\n[trainer]\nx = 2"))
    assert [label for label, _ in labels(c, d)] == ["data.x 1, trainer.x 1", "data.x 2, trainer.x 2"]


def test_a_run_without_a_readable_configuration_is_its_own_kind(make: Any) -> None:
    rows = [{"step": 1}]
    a, b, c = make("a", rows), make("b", rows), make("c", rows, "no = [toml")
    assert labels(a, b, c) == [("a", (0,)), ("b", (1,)), ("c", (2,))]
    # Two folders of one name stay apart.
    d = make("deep/a", rows)
    assert labels(a, d) == [("a (1)", (0,)), ("a (2)", (1,))]


def test_a_method_may_be_named_without_a_table(make: Any) -> None:
    assert labels(make("a", [{"step": 1}], 'method = "rloo"')) == [("rloo", (0,))]
    assert labels(make("b", [{"step": 1}], "x = 1")) == [("run", (0,))]


def test_a_pipeline_and_hostile_names(make: Any) -> None:
    rows = [{"step": 1}]
    a = make("a", rows, '[method]\nname = ["probepo", "cw_grpo"]\n')
    b = make("b", rows, '[method]\nname = "evil\\u202e\\u001b[31m"\n')
    assert [label for label, _ in labels(a, b)] == ["probepo+cw_grpo", "evil⟨U+202E⟩␛[31m"]


# --- curves ---------------------------------------------------------------------------------------------------------

ROWS = [
    {"step": 1, METRIC: 4.0, "tokens/actor": 80, "probe/tokens": 20, "step_time": 2.0},
    {"step": 2, METRIC: 2.0, "tokens/actor": 150, "probe/tokens": 50, "step_time": 3.0},
]


def test_axes_add_up_tokens_with_probes_and_seconds(make: Any) -> None:
    found = curves([make("a", ROWS, config())])
    assert grid(found, METRIC)["runs"] == [{"step": [1, 2], "tokens": [100, 300], "seconds": [2, 5]}]
    assert grid(found, METRIC)["mean"] is None
    assert curve(found, METRIC) == {"runs": [[4, 2]], "mean": None, "wilson": None}
    assert found["axes"] == {"step": True, "tokens": True, "seconds": True} and not found["averaged"]
    (run,) = found["kinds"][0]["runs"]
    assert run == {"name": "a", "seed": 0, "step": 2, "tokens": 300, "seconds": 5}
    assert found["kinds"][0]["spent"] == {"rollouts": 230, "probes": 70}


def test_an_axis_that_was_not_logged_is_none(make: Any) -> None:
    found = curves([make("a", [{"step": 1, METRIC: 1.0}])])
    assert found["axes"] == {"step": True, "tokens": False, "seconds": False}
    assert grid(found, METRIC)["runs"] == [{"step": [1], "tokens": None, "seconds": None}]
    assert found["kinds"][0]["spent"] == {}


def test_a_step_that_generates_nothing_adds_no_tokens(make: Any) -> None:
    rows = [ROWS[0], {"step": 2, METRIC: 1.0, "step_time": 1.0}, {**ROWS[1], "step": 3}]
    assert grid(curves([make("a", rows)]), METRIC)["runs"][0] == {
        "step": [1, 2, 3], "tokens": [100, 100, 300], "seconds": [2, 3, 6]
    }  # fmt: skip


def test_by_step_the_mean_is_over_the_seeds_that_have_it(make: Any) -> None:
    other = [{"step": 1, METRIC: 2.0}]
    found = curves([make("a", ROWS, config(0)), make("b", other, config(1))])
    # 4 and 2: mean 3, s = √2, half = 12.7062·√2/√2; then one seed alone.
    assert grid(found, METRIC)["mean"]["step"] == [1, 2]
    mean = curve(found, METRIC)["mean"]["step"]
    assert mean == {"mean": [3, 2], "low": [-9.7062, None], "high": [15.706, None], "n": [2, 1]}
    assert curve(found, METRIC)["runs"] == [[4, 2], [2]]


def test_over_tokens_seeds_are_interpolated_where_all_have_got(make: Any) -> None:
    # Seed 0 is at 100 and 300 tokens with 4 and 2; seed 1 at 50, 200 and 400 with 1, 4 and 6. All cover 100 to 300:
    # at 100 it is 4 and 1 + 3·50/150 = 2; at 200 3 and 4; at 300 2 and 5.
    rows = [{"step": k, METRIC: v, "tokens/actor": t} for k, v, t in [(1, 1.0, 50), (2, 4.0, 150), (3, 6.0, 200)]]
    found = curves([make("a", ROWS, config(0)), make("b", rows, config(1))])
    assert grid(found, METRIC)["mean"]["tokens"] == [100, 200, 300]
    mean = curve(found, METRIC)["mean"]["tokens"]
    assert mean["mean"] == [3, 3.5, 3.5] and mean["n"] == [2, 2, 2]
    # At 200: s = √0.5, half = 12.7062·√0.5/√2.
    assert mean["low"][1] == pytest.approx(3.5 - 6.3531, abs=1e-3)


def test_a_metric_that_a_seed_has_later_is_not_made_up_before(make: Any) -> None:
    late = [{**ROWS[0], METRIC: None}, {**ROWS[1], METRIC: 8.0}, {"step": 3, METRIC: 8.0, "tokens/actor": 100}]
    early = [ROWS[0], ROWS[1], {"step": 3, METRIC: 2.0, "tokens/actor": 100}]
    found = curves([make("a", early, config(0)), make("b", late, config(1))])
    mean = curve(found, METRIC)["mean"]["tokens"]
    assert grid(found, METRIC)["mean"]["tokens"] == [100, 300, 400]
    assert mean["mean"] == [None, 5, 5] and mean["n"] == [0, 2, 2]
    assert curve(found, METRIC)["mean"]["step"]["n"] == [1, 2, 2]


def test_seeds_that_overlap_nowhere_have_no_mean_over_tokens(make: Any) -> None:
    late = [{**ROWS[0], "tokens/actor": 500}]
    found = curves([make("a", ROWS, config(0)), make("b", late, config(1))])
    assert grid(found, METRIC)["mean"]["tokens"] == []
    assert curve(found, METRIC)["mean"]["tokens"] == {"mean": [], "low": [], "high": [], "n": []}


def test_what_is_no_finite_number_is_null(make: Any) -> None:
    values = [math.nan, math.inf, 10**400, True, "text", 1.5]
    found = curves([make("a", [{"step": k, METRIC: v, "word": "x"} for k, v in enumerate(values)])])
    assert curve(found, METRIC)["runs"] == [[None] * 5 + [1.5]]
    assert "word" not in [each["name"] for each in found["curves"]]
    json.dumps(found, allow_nan=False)


def test_a_count_that_is_no_number_adds_nothing(make: Any) -> None:
    found = curves([make("a", [{**ROWS[0], "tokens/actor": math.inf, "step_time": math.nan}, ROWS[1]])])
    assert grid(found, METRIC)["runs"] == [{"step": [1, 2], "tokens": [20, 220], "seconds": [0, 3]}]


def test_key_curves_come_first_in_their_order(make: Any) -> None:
    names = ["loss", "entropy", "reward", "probe/ratio", "credit/acr", "predicted/reward"]
    found = curves([make("a", [{"step": 1, **dict.fromkeys(names, 1.0)}], evaluations=[accuracy(0, 0, 0.5)])])
    order = [each["name"] for each in found["curves"] if not each["name"].startswith("predicted/")]
    assert order == ["evaluation/accuracy", "reward", "credit/acr", "probe/ratio", "entropy", "loss"]
    assert [each["key"] for each in found["curves"] if each["name"] in ("reward", "loss")] == [True, False]
    # A prediction has the x of what it predicts.
    assert {each["grid"] for each in found["curves"] if each["name"].endswith("reward")} == {"fine"}


def test_seconds_by_phase_and_tokens_are_means_over_seeds(make: Any) -> None:
    one = [
        {"step": k, "seconds/probe": 3.0, "seconds/update": v, "tokens/actor": 10} for k, v in [(1, 9), (2, 1), (3, 3)]
    ]
    two = [{"step": k, "seconds/update": 4.0, "tokens/actor": 30} for k in (1, 2, 3)]
    (kind,) = curves([make("a", one, config(0)), make("b", two, config(1))])["kinds"]
    # Medians without the first step, which warms up: 2 and 4; the second seed has no probes, which is 0 seconds.
    assert kind["phases"] == {"probe": 1.5, "update": 3} and kind["spent"] == {"rollouts": 60}


# --- held-out accuracy ----------------------------------------------------------------------------------------------


def accuracy(step: int, tokens: float, value: float, samples: int = 10) -> str:
    return json.dumps({"step": step, "tokens": tokens, "accuracy": value, "samples": samples})


HELD_OUT = "evaluation/accuracy"


def test_held_out_accuracy_of_one_seed_has_wilsons_interval(make: Any) -> None:
    found = curves([make("a", ROWS, evaluations=[accuracy(0, 0, 0.0), accuracy(2, 310, 0.5)])])
    assert curve(found, HELD_OUT)["runs"] == [[0, 0.5]]
    assert curve(found, HELD_OUT)["wilson"] == {"low": [0, 0.23659], "high": [0.27753, 0.76341]}
    # Its own count of tokens; seconds of the training steps before it.
    assert grid(found, HELD_OUT)["runs"] == [{"step": [0, 2], "tokens": [0, 310], "seconds": [0, 5]}]


def test_held_out_accuracy_of_several_seeds_has_students(make: Any) -> None:
    one = make("a", ROWS, config(0), [accuracy(0, 0, 0.2), accuracy(2, 300, 0.5)])
    two = make("b", ROWS, config(1), [accuracy(0, 0, 0.2), accuracy(2, 400, 0.7)])
    found = curves([one, two])
    assert curve(found, HELD_OUT)["wilson"] is None
    mean = curve(found, HELD_OUT)["mean"]
    # 0.5 and 0.7: s = √0.02, half = 12.7062·√0.02/√2 = 1.27062.
    assert mean["step"] == {"mean": [0.2, 0.6], "low": [0.2, -0.67062], "high": [0.2, 1.8706], "n": [2, 2]}
    # At 300 tokens the second is three quarters on its way from 0.2 to 0.7: 0.575.
    assert grid(found, HELD_OUT)["mean"]["tokens"] == [0, 300]
    assert mean["tokens"]["mean"] == [0.2, pytest.approx(0.5375, abs=1e-5)]


def test_a_half_written_last_line_is_none(make: Any) -> None:
    run = make("a", ROWS, evaluations=[accuracy(0, 0, 0.2), '{"step": 2, "accu'])
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    found = curves([run])
    assert curve(found, HELD_OUT)["runs"] == [[0.2]] and curve(found, METRIC)["runs"] == [[4, 2]]


def test_no_evaluations_are_no_curve(make: Any) -> None:
    assert HELD_OUT not in [each["name"] for each in curves([make("a", ROWS)])["curves"]]


# --- thinning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "points"), [("reward", POINTS), (METRIC, FEW)])
def test_long_runs_are_averages_of_consecutive_steps(make: Any, name: str, points: int) -> None:
    # A zigzag of 0 and 1, whose every second step would alias to 0 or to 1.
    steps = 2 * (points - 1) + 1
    rows = [{"step": k, name: float(k % 2), "tokens/actor": 10, "step_time": 1} for k in range(1, steps + 1)]
    found = curves([make("a", rows)])
    assert found["averaged"]
    assert curve(found, name)["runs"] == [[0.5] * (points - 1) + [1]]
    x = grid(found, name)["runs"][0]
    # The first bin is of steps 1 and 2, at 10 and 20 tokens.
    assert x["step"][0] == 1.5 and x["tokens"][0] == 15 and x["seconds"][0] == 1.5
    assert x["step"][-1] == steps and len(x["step"]) == points


def test_seeds_are_averaged_before_the_interval(make: Any) -> None:
    # Each step has 0 and 1 among its seeds, each bin has 0.5 of both: no spread.
    steps = 2 * (FEW - 1) + 1
    rows = [[{"step": k, METRIC: float((k + s) % 2)} for k in range(steps)] for s in (0, 1)]
    found = curves([make("a", rows[0], config(0)), make("b", rows[1], config(1))])
    mean = curve(found, METRIC)["mean"]["step"]
    assert mean["mean"] == [0.5] * FEW and mean["low"][0] == 0.5 and mean["n"] == [2] * FEW
    assert mean["low"][-1] == pytest.approx(0.5 - 12.7062 * 0.5, abs=1e-3)


def test_over_tokens_no_curve_is_longer_than_allowed(make: Any) -> None:
    rows = [[{"step": k, "reward": 1.0, "tokens/actor": 10 + s} for k in range(400)] for s in (0, 1)]
    found = curves([make("a", rows[0], config(0)), make("b", rows[1], config(1))])
    x = grid(found, "reward")["mean"]["tokens"]
    # 800 different x are too many; evenly spaced ones go from the later start to the earlier end.
    assert len(x) == POINTS and x[0] == 11 and x[-1] == 4000
    assert curve(found, "reward")["mean"]["tokens"]["mean"] == [1] * POINTS


def test_runs_without_a_row(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    found = curves([RunFolder(tmp_path)])
    assert found["curves"] == [] and found["kinds"][0]["runs"][0]["step"] is None
