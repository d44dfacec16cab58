"""The cluster recipes against the installed verl: every recipe with every method composes, passes verl's own checks and
apportion's, and is what verl itself would read from the command that is printed.

Faults planted in a copy, each caught here: a misspelt key in a recipe; `--set` of an unknown key passed on with ++; the
method's group left out of the command; a quotation mark in a text not escaped; apportion's own settings not checked;
GRPO under apportion's trainer; a rescue left in for a method without probes; a row longer than a pass's tokens let
through.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from apportion.errors import InputError

if find_spec("verl") is None:
    pytest.skip("verl is not installed here: run by `make cluster`", allow_module_level=True)

from apportion.cli import app
from apportion.integrations.verl.recipe import check, compose, literal, methods_of, plain

RECIPES = Path(__file__).parents[2] / "recipes" / "cluster"
NAMES = ("deepseekmath-7b", "r1-distill-qwen-1.5b", "qwen3-4b")
METHODS = ("grpo", "probepo", "vineppo")
QWEN = RECIPES / "qwen3-4b.yaml"


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    assert all(part in result.stderr for part in parts), result.stderr


def test_there_is_a_file_for_each_method() -> None:
    assert methods_of(QWEN) == sorted(METHODS)
    assert sorted(file.stem for file in RECIPES.glob("*.yaml")) == sorted([*NAMES, "common"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_with_every_method(name: str, method: str) -> None:
    found = compose(RECIPES / f"{name}.yaml", method)
    check(found)
    config = found.config
    assert config.algorithm.adv_estimator == "grpo" and config.actor_rollout_ref.rollout.n == 8
    assert found.devices == 8 and config.trainer.experiment_name == f"{name}-{method}"
    if method == "grpo":
        assert config.trainer.v1.trainer_mode == "sync" and config.apportion is None and found.credit is None
        return
    assert config.trainer.v1.trainer_mode == "apportion_sync"
    credit = found.credit
    assert credit is not None and credit.method == method
    # The paper's budget, and the authors' code's.
    expected = {"budget": 40, "samples": 8} if method == "probepo" else {"samples": 9}
    assert expected.items() <= credit.settings.items()
    assert (credit.rescue is not None) is (name == "r1-distill-qwen-1.5b")
    if credit.rescue is not None:
        assert credit.rescue.cue.endswith("\\boxed{") and config.data.max_response_length == 2048


def test_the_recipes_own_method_is_probepo() -> None:
    assert compose(QWEN).config.trainer.experiment_name == "qwen3-4b-probepo"


def test_any_other_method_of_the_registry() -> None:
    found = compose(RECIPES / "r1-distill-qwen-1.5b.yaml", "cw_grpo")
    check(found)
    # It makes no probes, and there is nothing to rescue.
    assert found.credit is not None and found.credit.method == "cw_grpo" and found.credit.rescue is None
    assert found.config.trainer.experiment_name == "r1-distill-qwen-1.5b-cw_grpo"
    several = compose(RECIPES / "r1-distill-qwen-1.5b.yaml", "probepo,cw_grpo")
    check(several)
    assert several.credit is not None and several.credit.method == ("probepo", "cw_grpo")
    assert several.credit.rescue is not None


def test_verl_reads_from_the_command_what_was_checked() -> None:
    found = compose(RECIPES / "r1-distill-qwen-1.5b.yaml", "vineppo", {
        "data.seed": 3, "apportion.rescue.cue": "it's \\boxed{'", "actor_rollout_ref.rollout.engine_kwargs.vllm.x": 1,
        "+data.extra": [1, "two"],
    }, gpus=16)  # fmt: skip
    printed = subprocess.run(
        [*found.command, "--cfg", "job", "--resolve"], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    from omegaconf import OmegaConf

    read = OmegaConf.to_container(OmegaConf.create(printed))
    assert read == plain(found.config)
    assert found.devices == 16 and found.config.trainer.nnodes == 2
    assert read["apportion"]["rescue"]["cue"] == "it's \\boxed{'" and read["data"]["extra"] == [1, "two"]
    assert read["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"] == {"x": 1}


def test_a_misspelt_key_of_a_recipe_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nactor_rollout_ref:\n  rollout:\n    gpu_memory_utilisation: 0.5\n"
    )
    with pytest.raises(InputError) as error:
        compose(tmp_path / "mine.yaml")
    assert "actor_rollout_ref.rollout.gpu_memory_utilisation" in error.value.field
    assert "did you mean 'gpu_memory_utilization'" in str(error.value)


@pytest.mark.parametrize(
    ("key", "close"),
    [
        ("data.train_bach_size", "'train_batch_size'"), ("dta.train_batch_size", "'data'"),
        ("actor_rollout_ref.actor.optim.lrr", "'lr'"), ("data.train_batch_size.deep", "nothing below it"),
    ],
)  # fmt: skip
def test_a_misspelt_key_of_a_setting_is_named(key: str, close: str) -> None:
    with pytest.raises(InputError) as error:
        compose(QWEN, settings={key: 1})
    assert error.value.field == f"--set {key}" and close in str(error.value)


def test_a_misspelt_setting_of_apportions_is_named() -> None:
    with pytest.raises(InputError, match=r"apportion\.probe\.in_flihgt.*'in_flight'"):
        check(compose(QWEN, settings={"apportion.probe.in_flihgt": 3}))
    with pytest.raises(InputError, match=r"apportion\.settings\.budgt.*'budget'"):
        check(compose(QWEN, settings={"apportion.settings.budgt": 3}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"actor_rollout_ref.rollout.gpu_memory_utilization": "much"}, "gpu_memory_utilization"),
        ({"actor_rollout_ref.actor.loss_agg_mode": "mean"}, "loss_agg_mode"),
        ({"actor_rollout_ref.actor.use_dynamic_bsz": False}, "ppo_micro_batch_size"),
        ({"trainer.v1.trainer_mode": "apportion_sink"}, "apportion_sink"),
        ({"data.max_response_length": 60_000}, "ppo_max_token_len_per_gpu"),
        ({"algorithm.adv_estimator": "gae"}, "adv_estimator"),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "geo_mean"}, "loss_mode"),
        ({"data.train_files": "${nothing.there}"}, "nothing"),
    ],
)
def test_what_verl_or_the_method_refuse_is_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        check(compose(QWEN, settings=settings))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_gpus_are_nodes_of_eight() -> None:
    assert compose(QWEN, gpus=4).devices == 4 and compose(QWEN, gpus=24).config.trainer.nnodes == 3
    for wrong in (0, 12):
        with pytest.raises(InputError, match="--gpus"):
            compose(QWEN, gpus=wrong)


def test_files_and_methods_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="recipe"):
        compose(tmp_path / "none.yaml")
    with pytest.raises(InputError, match=r"--method.*'probepo'"):
        compose(QWEN, "probpo")
    (tmp_path / "bad.yaml").write_text("defaults: [nothing_like_it]\n")
    with pytest.raises(InputError, match="nothing_like_it"):
        compose(tmp_path / "bad.yaml")


plain_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8", exclude_characters="$", exclude_categories=("Cc", "Cs"))),
)  # fmt: skip


@given(st.one_of(plain_values, st.lists(plain_values, max_size=3)))
def test_hydra_reads_back_what_is_written(value: Any) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import QuotedString

    def read(found: Any) -> Any:
        if isinstance(found, list):
            return [read(each) for each in found]
        return found.text if isinstance(found, QuotedString) else found

    parsed = read(OverridesParser.create().parse_override(f"a={literal(value)}").value())
    assert parsed == value and type(parsed) is type(value)


def test_a_dry_run_says_what_it_takes_and_what_to_run() -> None:
    result = command("cluster", RECIPES / "deepseekmath-7b.yaml", "--dry-run", "--method", "vineppo", "--gpus", 8,
                     "--set", "data.train_batch_size=128", "--response-length", 250)  # fmt: skip
    assert result.exit_code == 0, (result.output, result.exception)
    out = result.stdout
    assert "One step of vineppo on h100x8" in out and "1024 responses of 250 tokens" in out
    assert f"{1024 * 250:,}" in out and "GPU hours" in out and "engine" in out and "fits" in out
    assert "verl.trainer.main_ppo" in out and "method=vineppo" in out and "data.train_batch_size=128" in out
    assert "apportion evaluate" in out and "math500,olympiadbench,collegemath,amc,minerva,aime24" in out
    assert "verl.model_merger" in out and "note: data.train_files" in result.stderr


def test_a_run_without_its_data_does_not_start() -> None:
    refused(command("cluster", QWEN), "data.train_files", "apportion cluster-data")


def test_a_run_is_the_command_that_was_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    problems = tmp_path / "p.jsonl"
    problems.write_text("".join(json.dumps({"problem": f"{i}+1?", "answer": str(i + 1)}) + "\n" for i in range(4)))
    assert command("cluster-data", "--data", problems, "-o", tmp_path).exit_code == 0
    ran: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, arguments: ran.append([path, *arguments]))
    files = {f"data.{part}_files": tmp_path / f"{name}.parquet" for part, name in (("train", "train"), ("val", "test"))}
    command("cluster", QWEN, "--method", "grpo", *(f"--set={key}={value}" for key, value in files.items()))
    assert ran and ran[0][0] == ran[0][1] == sys.executable and ran[0][2:4] == ["-m", "verl.trainer.main_ppo"]
    assert "method=grpo" in ran[0] and any("train.parquet" in each for each in ran[0])


def test_verls_dataset_reads_what_cluster_data_wrote(tmp_path: Path) -> None:
    import datasets

    problems = tmp_path / "p.jsonl"
    problems.write_text("".join(json.dumps({"problem": f"{i}+1?", "answer": str(i + 1)}) + "\n" for i in range(4)))
    assert command("cluster-data", "--data", problems, "-o", tmp_path, "--prompt", "qwen").exit_code == 0
    row = datasets.load_dataset("parquet", data_files=str(tmp_path / "train.parquet"))["train"][2]
    assert row["prompt"][1] == {"content": "2+1?", "role": "user"} and row["extra_info"]["index"] == 2


def test_verl_loads_the_reward_function_that_the_recipes_name() -> None:
    from verl.trainer.ppo.reward import get_custom_reward_fn

    found = compose(QWEN, settings={"+reward.custom_reward_function.reward_kwargs.kind": "exact"})
    score = get_custom_reward_fn(found.config)
    assert score is not None
    assert score(data_source="", solution_str="three", ground_truth="three", extra_info={}) == 1.0
