"""What a page asks for, by key: a step that is recorded again is read again, one that is half there is left out.

Planted faults seen caught: the stamp left out of the kept views, and of the kept extremes; a broken step failing the
index; a key matched by its beginning.
"""

from __future__ import annotations

import os

import pytest
from synthetic import write_run

from apportion.errors import InputError
from apportion.records import RunFolder
from apportion.report.site import Site


@pytest.fixture
def own(tmp_path) -> RunFolder:
    return write_run(tmp_path / "run", steps=3, prompts=2, group=4, logged=6)


def rewrite(run: RunFolder, kind: str, step: int, rows) -> None:
    run.write(kind, step, rows)
    file = run.path / kind / f"step-{step:06d}.parquet"
    os.utime(file, ns=(1, 1))  # clocks of file systems are coarse, so the time is set to another


def test_keys_name_steps_and_rows(own):
    site, last = Site(own), own.steps()[-1]
    assert site.chunk(f"step-{last}")["step"] == last
    assert site.chunk(f"step-{last}-row-3")["row"] == 3
    for key in (
        f"step-{last}-row-99",
        "step-999",
        f"step-{last}-row-",
        f"step-{last}-row-3x",
        "step-",
        "compare-1",
        "..",
        "",
    ):
        with pytest.raises(InputError):
            site.chunk(key)


def test_a_step_that_is_recorded_again_is_read_again(own):
    site, last = Site(own, live=True), own.steps()[-1]
    before = site.index()["extremes"], site.chunk(f"step-{last}")["responses"][0]["base"]
    rows = [{**row, "advantage": [9.0] * len(row["advantage"]), "base": 9.0} for row in own.read("credit", last)]
    rewrite(own, "credit", last, rows)
    assert site.chunk(f"step-{last}")["responses"][0]["base"] == 9.0 != before[1]
    assert {e["advantage"] for e in site.index()["extremes"] if e["step"] == last} == {9.0}
    # What did not change is the very same.
    assert site.step(last) is site.step(last)


def test_a_step_that_is_half_there_is_left_out_of_a_growing_page(own):
    site, (first, second, last) = Site(own, live=True), own.steps()
    rewrite(own, "credit", last, own.read("credit", last)[:-1])
    index = site.index()
    assert index["steps"] == [first, second] and f"step {last}" in index["left_out"][0]
    (own.path / "rollouts" / f"step-{second:06d}.parquet").write_bytes(b"PAR1 and no more")
    assert site.index()["steps"] == [first]
    assert index["start"]["step"] == second


def test_files_of_other_names_are_no_steps(own):
    for name in ("step-x.parquet", "step-.parquet", "step-1٣.parquet", "step--00001.parquet"):
        (own.path / "credit" / name).write_bytes(b"")
    assert own.steps() == [40, 50, 60]
