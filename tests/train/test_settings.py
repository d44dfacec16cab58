"""The configuration: what a file or `--set` can say, what is refused, and that TOML written loads as it was.

Planted faults seen caught: control characters left raw in TOML, keys of a table left bare, floats written as JSON
(`NaN`, `Infinity`), method settings left out of the resolved file, overrides applied before the file.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.errors import InputError
from apportion.train.settings import RunConfig, load_config, resume_config, save_config, to_toml

RECIPES = sorted(
    path for kind in ("*.toml", "trl/*.toml") for path in (Path(__file__).parents[2] / "recipes").glob(kind)
)


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_name_every_setting_of_the_method() -> None:
    config = load_config(None)
    assert config.run.steps == 100 and config.model.name == "embedded"
    assert config.method["name"] == "probepo" and config.method["budget"] == 40 and config.method["alpha"] == 0.5


def test_file_then_overrides(tmp_path: Path) -> None:
    path = written(tmp_path / "c.toml", '[run]\nsteps = 7\nseed = 3\n[method]\nname = "vineppo"\nsamples = 2\n')
    config = load_config(path, {"run.steps": 9, "method.samples": 5, "trainer.beta": 0.1})
    assert (config.run.steps, config.run.seed, config.method["samples"]) == (9, 3, 5)
    assert config.method["name"] == "vineppo" and config.trainer == {"beta": 0.1}


def test_another_method_leaves_the_settings_of_the_files_behind(tmp_path: Path) -> None:
    path = written(tmp_path / "c.toml", '[method]\nname = "probepo"\nbudget = 16\nalpha = 0.25\n')
    config = load_config(path, {"method.samples": 9, "method.name": "vineppo"})
    assert config.method["name"] == "vineppo" and config.method["samples"] == 9 and "budget" not in config.method
    assert load_config(path, {"method.name": "probepo"}).method["alpha"] == 0.25


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
LEAVES = st.one_of(TEXT, st.booleans(), st.integers(-(2**62), 2**62), st.floats())
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3), max_leaves=6)


@given(st.dictionaries(TEXT.filter(bool), VALUES, max_size=4), TEXT)
def test_toml_loads_as_the_configuration_it_was(trainer: dict, system: str) -> None:
    config = load_config(None, {"data.system": system, "data.detour": 1e-07})
    config = config.model_copy(update={"trainer": trainer})
    text = to_toml(config)
    # NaN differs from itself, so what is compared is how the values print.
    assert repr(RunConfig.model_validate(tomllib.loads(text))) == repr(config)


def test_floats_that_json_has_no_name_for() -> None:
    config = load_config(None).model_copy(update={"trainer": {"a": math.inf, "b": -math.inf, "c": 1e30}})
    assert tomllib.loads(to_toml(config))["trainer"] == {"a": math.inf, "b": -math.inf, "c": 1e30}


def test_saved_folder_may_move(tmp_path: Path) -> None:
    config = load_config(None, {"run.folder": str(tmp_path / "a"), "run.steps": 4})
    save_config(config)
    (tmp_path / "a").rename(tmp_path / "b")
    assert resume_config(tmp_path / "b") == load_config(None, {"run.folder": str(tmp_path / "b"), "run.steps": 4})
    with pytest.raises(InputError, match=r"--resume: got .*; expected the folder of a run, with config\.toml"):
        resume_config(tmp_path / "a")


def test_run_folder_that_cannot_be(tmp_path: Path) -> None:
    written(tmp_path / "file", "")
    with pytest.raises(InputError, match=r"run\.folder: got .*file/run: .*; expected a folder that can be written"):
        save_config(load_config(None, {"run.folder": str(tmp_path / "file" / "run")}))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"run.stepz": 3}, r"run\.stepz: got an unknown key; expected one of folder, .*, did you mean 'steps'\?"),
        ({"rum.steps": 3}, r"\[rum\]: got an unknown section; expected one of run, .*, did you mean 'run'\?"),
        ({"steps": 3}, r"--set: got 'steps'; expected section\.key=value"),
        ({"run.steps": 0}, r"run\.steps: got 0; expected greater than or equal to 1$"),
        ({"run.steps": "many"}, r"run\.steps: got 'many'; expected a valid integer$"),
        ({"data.operations": 2.5}, r"data\.operations: got 2\.5; expected a valid integer"),
        ({"data.modulus": 1001}, r"data\.modulus: got 1001; expected less than or equal to 1000$"),
        ({"model.dtype": "float16"}, r"model\.dtype: got 'float16'; expected 'float32' or 'bfloat16'$"),
        ({"reward.kind": "maths"}, r"reward\.kind: got 'maths'; expected 'auto', 'task', 'math'"),
        ({"method.name": "probpo"}, r"method: got 'probpo'; .* did you mean 'probepo'\?"),
        ({"method.budgett": 1}, r"probepo\.budgett: got an unknown setting; .* did you mean 'budget'\?"),
        ({"method.budget": 4}, r"probepo.*: got (?!Value error).*at least samples, 8"),
        ({"method.budget": "x"}, r"probepo\.budget: got 'x'; expected a valid integer$"),
        ({"method.alpha": math.inf}, r"probepo\.alpha: got inf; expected a finite number$"),
        ({"method.placement": "here"}, r"probepo\.placement: got 'here'; expected 'entropy' or 'random'$"),
    ],
)
def test_refused_overrides(override: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_config(None, override)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nsteps = 1 2\n", r"config .*c\.toml: got .*line 2.*; expected valid TOML"),
        ("run = 3", r"run: got 3; expected a table: \[run\]"),
        ("[runs]\nsteps = 3", r"\[runs\]: got an unknown section; .* did you mean 'run'\?"),
        ("[model]\nnam = 'x'", r"model\.nam: got an unknown key; .* did you mean 'name'\?"),
        ("[run]\nsteps = 1979-05-27", r"run\.steps: got datetime\.date.*; expected a valid integer"),
    ],
)
def test_refused_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_config(written(tmp_path / "c.toml", text))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config: got .*none\.toml; expected a TOML file that exists"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"[run]\nfolder = '\xe9'\n")
    with pytest.raises(InputError, match=r"latin\.toml: got .*; expected valid TOML"):
        load_config(tmp_path / "latin.toml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_load_and_name_their_source_and_cost(path: Path) -> None:
    from apportion.train.prepare import resolve

    config = resolve(load_config(path))
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(line.startswith("# Source: ") for line in comments)
    assert any(line.startswith("# Cost: ") for line in comments)
    assert config.run.folder == f"runs/{path.stem}"
    assert tomllib.loads(to_toml(config)) == tomllib.loads(to_toml(resolve(load_config(path))))


def test_there_are_recipes() -> None:
    names = {path.stem for path in RECIPES}
    assert names >= {"embedded-probepo", "embedded-vineppo", "embedded-grpo", "smollm2-gsm8k"}


def test_a_pipeline_is_a_list_of_names_with_a_table_each(tmp_path: Path) -> None:
    path = written(tmp_path / "c.toml", '[method]\nname = ["avspo", "oar_p"]\n[method.avspo]\nthreshold = 0.2\n')
    config = load_config(path, {"method.avspo.rate": 0.5, "method.oar_p.beta": 2})
    assert config.method["name"] == ["avspo", "oar_p"]
    assert (config.method["avspo"]["threshold"], config.method["avspo"]["rate"]) == (0.2, 0.5)
    # The generated task's way to state an answer reaches the stage, beside what was set.
    assert config.method["oar_p"]["beta"] == 2 and config.method["oar_p"]["answer_pattern"] == r"#(\d+)"
    save_config(config.model_copy(update={"run": config.run.model_copy(update={"folder": str(tmp_path)})}))
    assert resume_config(tmp_path).method == config.method
    # State that has no value yet is left out of TOML and comes back as none.
    assert "last_mean" not in to_toml(config) and resume_config(tmp_path).method["avspo"]["last_mean"] is None


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("method.name", ["probepo", "oar_p"], "one method that spreads credit"),
        ("method.name", ["cw_grpo", "probepo"], "cannot follow"),
        ("method.name", ["rloo", "vineppo"], "no base estimator before vineppo"),
        ("method.name", ["avspo", "probpo"], "probepo"),
        ("method.name", [], "method"),
        ("method.name", [1], "method.name: got"),
    ],
)
def test_nonsensical_pipelines_are_refused_when_the_configuration_is_loaded(
    key: str, value: object, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_config(None, {key: value})
