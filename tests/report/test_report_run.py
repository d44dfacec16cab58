"""The run view in a real browser: its axes, the crosshair by keyboard, and that a growing page disturbs no reader.

Planted faults seen caught: everything drawn anew, nothing drawn anew, a table closed or the crosshair lost when a chart
is updated, credits ranked by sign, an axis offered that was not logged, predictions not drawn.
"""

from __future__ import annotations

import json
import re

import pytest

from apportion.records import RunFolder
from apportion.report import write_page

CONFIG = '[run]\nseed = {seed}\n[method]\nname = "{method}"\n'
# Two tokens of a response of the group: A is 3 and −1, base 1.
CREDIT = [{"token_ids": [1, 2, 3], "text": "abc", "char_start": [0, 1, 2], "advantage": [3.0, -1.0, -1.0], "base": 1.0}]


@pytest.fixture
def page_of(handmade, opened, tmp_path):
    """Opens the run view of a run of three seeds beside one of another method."""

    def other(name, method, seed, values):
        run = RunFolder(tmp_path / name)
        for k, value in enumerate(values, 1):
            run.log({"step": k, "reward": value, "tokens/actor": 100 * (1 + seed), "seconds/update": 2.0 + k})
        (run.path / "config.toml").write_text(CONFIG.format(seed=seed, method=method))
        return run

    def open_it(**options):
        own = handmade(
            CREDIT, metrics={"tokens/actor": 100, "predicted/reward": 0.25, "loss": 1.0, "seconds/update": 1.0}
        )
        own.log(
            {
                "step": 2,
                "reward": 0.8,
                "tokens/actor": 100,
                "predicted/reward": 0.25,
                "loss": 2.0,
                "seconds/update": 3.0,
            }
        )
        (own.path / "config.toml").write_text(CONFIG.format(seed=0, method="probepo"))
        evaluations = [{"step": 0, "tokens": 0, "accuracy": 0.5, "samples": 10}]
        (own.path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))
        beside = [
            other("b", "probepo", 1, [0.3, 0.6]),
            other("c", "probepo", 2, [0.4, 0.7]),
            other("d", "grpo", 0, [0.1]),
        ]
        return opened(write_page(own, tmp_path / "page.html", beside=beside), "#view=run", **options)

    return open_it


def plot(page, name):
    return page.locator("figure.curve").filter(has=page.locator(f"figcaption b:text-is('{name}')")).locator(".plot")


def test_means_and_intervals_under_the_keyboard(page_of):
    page = page_of()
    reward = plot(page, "reward")
    assert "probepo: from 0.4 at step 1 to 0.7 at 2, predicted 0.25." in reward.get_attribute("aria-label")
    assert "grpo: from 0.1 at step 1 to 0.1 at 1." in reward.get_attribute("aria-label")
    reward.focus()
    page.keyboard.press("Home")
    # 0.5, 0.3 and 0.4: s = 0.1, half = 4.302653·0.1/√3 = 0.2484.
    assert reward.get_attribute("aria-valuetext") == "step 1: probepo 0.4 0.1516 to 0.6484 3 seeds; grpo 0.1"
    page.keyboard.press("ArrowRight")
    # 0.8, 0.6 and 0.7; grpo has ended.
    assert reward.get_attribute("aria-valuetext").startswith("step 2: probepo 0.7 0.4516 to 0.9484 3 seeds")
    assert reward.get_attribute("aria-valuenow") == "1" and reward.get_attribute("aria-valuemax") == "1"
    page.keyboard.press("Escape")
    assert reward.get_attribute("aria-valuetext").startswith("at the end: ")


def test_one_switch_changes_the_axis_of_all(page_of):
    page = page_of()
    page.get_by_label("generated tokens").check()
    labels = [p.get_attribute("aria-label") for p in page.locator("figure.curve .plot").all()]
    assert labels and all(" over generated tokens." in label for label in labels)
    # Seeds begin at 100, 200 and 300 tokens, and the first ends at 200: nowhere are all three.
    assert "probepo" not in plot(page, "reward").get_attribute("aria-label")
    # No step_time was logged.
    assert page.get_by_label("wall-clock seconds").is_disabled()


def test_the_legend_says_where_there_is_no_interval(page_of):
    words = page_of().locator("ul.kinds li").all_inner_texts()
    assert [" ".join(w.split()) for w in words] == ["probepo 3 seeds: run, b, c", "grpo d, one seed: no interval"]


def test_every_chart_has_its_numbers_as_a_table(page_of):
    page = page_of()
    figure = page.locator("figure.curve").filter(has_text="reward").first
    assert figure.locator("table").count() == 0
    figure.locator("summary").click()
    rows = [r.inner_text().split() for r in figure.locator("table").first.locator("tbody tr").all()]
    assert rows == [["1", "0.4", "0.1516", "0.6484", "3"], ["2", "0.7", "0.4516", "0.9484", "3"]]
    assert figure.locator("table th[scope=row]").count() == 3
    assert page.locator("figure.curve").count() == page.locator("figure.curve details.twin").count()


def test_seconds_and_tokens_as_tables(page_of):
    page = page_of()
    time, tokens = (page.locator(".panels section").nth(i) for i in (0, 1))
    # Without the first step, which warms up: 3; not predicted; the seeds' medians 3, 4 and 4; and grpo's only step 3.
    assert time.locator("tbody tr").first.inner_text().split() == [
        "update",
        "3.000",
        "s",
        "–",
        "–",
        "3.667",
        "s",
        "3.000",
        "s",
    ]
    assert tokens.locator("tbody tr").first.inner_text().split()[:2] == ["probepo", "400"]


def test_extreme_credits_sort_and_lead_to_their_token(page_of):
    page = page_of()
    first = page.locator("table.extremes tbody tr").first
    assert first.inner_text().split()[:5] == ["1", "+3.00", "+2.00", "token", "0"]
    page.get_by_role("button", name=re.compile("^A ")).first.click()
    sorts = page.locator("table.extremes th").evaluate_all("l => l.map(n => n.ariaSort)")
    assert sorts == ["none", "ascending"] + ["none"] * 9 and first.inner_text().split()[1] == "−1.00"
    page.get_by_role("button", name=re.compile("^A ")).first.click()
    assert first.inner_text().split()[1] == "+3.00"
    # |A − base| is 2 for both, and the longer comes first.
    page.get_by_label("|A − base|").check()
    assert first.inner_text().split()[:5] == ["1", "−1.00", "−2.00", "tokens", "1–2"]
    first.locator("a").click()
    page.locator("body[data-view=response]").wait_for()
    assert page.evaluate("state.token") == 1


def test_a_new_index_redraws_what_has_changed_and_keeps_the_reader(page_of):
    page = page_of()
    page.get_by_label("generated tokens").check()
    page.get_by_label("step", exact=True).check()
    page.locator(".more > summary").click()
    plot(page, "loss").wait_for()
    page.locator("details.twin summary").nth(1).click()
    page.get_by_role("button", name="tokens", exact=False).last.click()
    plot(page, "reward").focus()
    page.keyboard.press("Home")
    page.evaluate("window.kept = [...document.querySelectorAll('.plot > svg, .extremes tr, .bars, .twin table')]")
    page.evaluate("apply(JSON.parse(JSON.stringify(index)), false)")
    assert page.evaluate("kept.length > 5 && kept.every((node) => node.isConnected)")
    page.evaluate("""() => { const next = JSON.parse(JSON.stringify(index));
        const curve = (name) => next.curves.curves.find((each) => each.name === name).kinds[0];
        curve("loss").runs[0][1] = 9; curve("reward").mean.step.mean[0] = 0.45; return apply(next, false); }""")
    # The two charts, and the two tables of the one that is open: one for each kind.
    assert page.evaluate("kept.filter((node) => !node.isConnected).length") == 4
    assert plot(page, "reward").evaluate("node => node === document.activeElement")
    assert plot(page, "reward").get_attribute("aria-valuetext").startswith("step 1: probepo 0.45 ")
    assert page.locator("details.twin[open] tbody td").first.inner_text() == "0.45"
    assert page.locator("details.twin[open]").count() == 1 and page.get_by_label("step", exact=True).is_checked()
    assert page.locator(".extremes [aria-sort=ascending]").inner_text().startswith("tokens")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_nothing_is_wider_than_the_window(page_of, scheme, width):
    page = page_of(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.locator("figure.curve svg").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_names_of_metrics_are_text(handmade, opened, tmp_path):
    name = "<img src=x onerror=alert(1)>\u202e"
    run = handmade(CREDIT, metrics={name: 1.0})
    page = opened(write_page(run, tmp_path / "page.html"), "#view=run")
    page.locator(".more > summary").click()
    assert page.locator("figure.curve b").last.inner_text() == "<img src=x onerror=alert(1)>⟨U+202E⟩"
    assert page.locator("img").count() == 0


def test_the_index_of_a_long_run_stays_small(tmp_path):
    from apportion.report.curves import curves

    run = RunFolder(tmp_path)
    names = ["reward", "entropy", *(f"m{i}" for i in range(10))]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for k in range(3000):
            file.write(json.dumps({"step": k, **dict.fromkeys(names, k / 7)}) + "\n")
    # Two curves of 500 points and ten of 120, with x of one axis: some 20 kB.
    assert len(json.dumps(curves([run]))) < 40_000
