"""`apportion cluster` and `apportion cluster-data` where verl is not installed, and what needs no verl: the data, the
reward function, the prediction.

Faults planted in a copy, each caught here: an abstention scored 0; the instruction left out; a row numbered as in its
file and not in its part; the engine's memory not counted; the updates of a step counted as one; probes of a replica of
two devices counted twice; rows that never wait for a slot.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner, Result

from apportion.cli import app
from apportion.cost import Assumed, find_hardware
from apportion.cost.serving import Serving
from apportion.cost.shape import ModelShape, shape_from
from apportion.errors import InputError
from apportion.integrations.verl.predicted import ClusterPrediction, predict_cluster
from apportion.integrations.verl.reward import Abstained, compute_score
from apportion.integrations.verl.settings import CreditSettings

RECIPES = Path(__file__).parents[2] / "recipes" / "cluster"
# As the models' cards name them: billions of weights.
SIZES = {"deepseekmath-7b": 6.91, "r1-distill-qwen-1.5b": 1.777, "qwen3-4b": 4.022}


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    assert all(part in result.stderr for part in parts), result.stderr


def written(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


PROBLEMS = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(20)]


def test_without_verl_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import apportion.integrations.verl.recipe as recipe

    monkeypatch.setattr(recipe, "find_spec", lambda name: None)
    refused(command("cluster", RECIPES / "qwen3-4b.yaml", "--dry-run"), "verl", "pip install 'apportion[verl]'")


def test_one_device_is_named_and_counted_apart() -> None:
    refused(command("cluster", RECIPES / "qwen3-4b.yaml", "--hardware", "h100x8"), "--hardware", "--gpus 8")
    refused(command("cluster", RECIPES / "qwen3-4b.yaml", "--hardware", "h1000"), "--hardware", "h100")


def test_the_data_is_in_verls_columns(tmp_path: Path) -> None:
    result = command("cluster-data", "--data", written(tmp_path, PROBLEMS), "-o", tmp_path / "out", "--held-out", 3)
    assert result.exit_code == 0, result.output
    train, test = (pq.read_table(tmp_path / "out" / f"{name}.parquet").to_pylist() for name in ("train", "test"))
    assert len(train) == 17 and len(test) == 3
    assert train[4] == {
        "data_source": "problems",
        "prompt": [
            {
                "role": "user",
                "content": "What is 4 + 1?\nPlease reason step by step, and put your final answer within \\boxed{}.",
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"index": 4, "split": "train"},
    }
    # verl tells the rows of a file apart by this number.
    assert [row["extra_info"] for row in test] == [{"index": i, "split": "test"} for i in range(3)]
    assert [row["reward_model"]["ground_truth"] for row in test] == ["18", "19", "20"]


@pytest.mark.parametrize(
    ("style", "roles"), [("qwen", ["system", "user"]), ("chat", ["user"]), ("bare", ["user"])]
)  # fmt: skip
def test_prompts_are_those_of_evaluations(tmp_path: Path, style: str, roles: list[str]) -> None:
    command("cluster-data", "--data", written(tmp_path, PROBLEMS), "-o", tmp_path, "--prompt", style)
    messages = pq.read_table(tmp_path / "train.parquet").to_pylist()[0]["prompt"]
    assert [message["role"] for message in messages] == roles
    texts = [message["content"] for message in messages]
    assert "".join(texts).count("boxed") == (style != "bare")
    assert texts[-1].startswith("What is 0 + 1?") and (style == "chat" or texts[-1] == "What is 0 + 1?")


def test_a_tenth_is_held_out(tmp_path: Path) -> None:
    command("cluster-data", "--data", written(tmp_path, PROBLEMS), "-o", tmp_path)
    assert pq.read_metadata(tmp_path / "test.parquet").num_rows == 2


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, [*PROBLEMS, {"problem": "?", "answer": "\\frac{1}{"}])
    refused(command("cluster-data", "--data", file, "-o", tmp_path / "o"), "row 21", "--drop-unreadable")
    assert not (tmp_path / "o").exists()
    result = command("cluster-data", "--data", file, "-o", tmp_path / "o", "--drop-unreadable")
    assert result.exit_code == 0 and "dropped: 1" in result.stdout
    refused(command("cluster-data", "--data", file, "-o", tmp_path, "--prompt", "chatt"), "--prompt", "'chat'")
    short = written(tmp_path, PROBLEMS[:1])
    refused(command("cluster-data", "--data", short, "-o", tmp_path), "--held-out", "less than the 1 rows")


def score(text: str, gold: Any, **settings: Any) -> float:
    return compute_score("math", text, gold, {"index": 0}, **settings)


def test_scores_are_the_verifiers() -> None:
    assert score("so \\boxed{\\frac{1}{2}}", "0.5") == 1.0
    assert score("so \\boxed{3}", "0.5") == 0.0 == score("no idea", "0.5")
    # Several accepted answers, as a Parquet column of lists comes back.
    assert score("so \\boxed{3}", np.array(["0.5", "3"], dtype=object)) == 1.0
    assert score("three", "three", kind="exact") == 1.0


def test_an_abstention_is_no_wrong_answer() -> None:
    with pytest.raises(Abstained, match="no reward"):
        score("so \\boxed{3}", "")
    with pytest.raises(InputError, match="kind"):
        score("3", "3", kind="maths")


def resolved(name: str, method: str = "probepo", **changes: Any) -> dict[str, Any]:
    """A recipe over the part of verl's defaults that a prediction reads, merged by hand."""
    config: dict[str, Any] = {
        "actor_rollout_ref": {
            "actor": {
                "ppo_epochs": 1, "use_kl_loss": False, "optim": {"optimizer": "AdamW"},
                "fsdp_config": {
                    "model_dtype": "fp32", "dtype": "bfloat16", "param_offload": False, "optimizer_offload": False,
                },
            },
            "rollout": {"dtype": "bfloat16"}, "model": {"lora_rank": 0, "use_fused_kernels": False},
        },
        "algorithm": {"use_kl_in_reward": False},
    }  # fmt: skip
    for file in (RECIPES / "common.yaml", RECIPES / f"{name}.yaml", RECIPES / "method" / f"{method}.yaml"):
        merge(config, {key: value for key, value in yaml.safe_load(file.read_text()).items() if key != "defaults"})
    for key, value in changes.items():
        *path, last = key.split("__")
        node = config
        for part in path:
            node = node[part]
        node[last] = value
    return config


def merge(into: dict[str, Any], table: dict[str, Any]) -> None:
    for key, value in table.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def predicted(name: str, method: str = "probepo", hardware: str = "h100x8", **changes: Any) -> ClusterPrediction:
    config = resolved(name, method, **changes)
    credit = None if method == "grpo" else CreditSettings.of(config["apportion"])
    return predict_cluster(config, credit, find_hardware(hardware))


@pytest.mark.parametrize("name", SIZES)
def test_models_have_the_weights_of_their_cards(name: str) -> None:
    numbers = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["recipe"]["model"]
    assert shape_from(numbers).parameters / 1e9 == pytest.approx(SIZES[name], abs=0.01)


def test_weights_of_a_qwen3_layer_by_hand() -> None:
    numbers = yaml.safe_load((RECIPES / "qwen3-4b.yaml").read_text())["recipe"]["model"]
    shape = shape_from(numbers)
    # q and o of 32 heads of 128, k and v of 8, the gated MLP, two norms of the state and two of a head.
    layer = 2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128
    assert shape.layer_parameters == layer and shape.parameters == 36 * layer + 151_936 * 2560 + 2560


def test_numbers_of_no_model_are_refused() -> None:
    with pytest.raises(InputError, match=r"model\.name"):
        shape_from({"model_type": "lama"})


def test_grpo_on_qwen3_by_hand() -> None:
    found = predicted("qwen3-4b", "grpo")
    # 64 prompts of 8 responses of 900 tokens in all; no probes.
    assert found.tokens["tokens/actor"] == 64 * 8 * 900 and found.tokens["probe/tokens"] == 0
    assert found.updates == 1 and found.steps == 500
    assert found.update.uncounted == frozenset() and found.parts["probing"] == 0
    parameters, kv = 4_022_468_096, 2 * 36 * 8 * 128
    # Update: 64 rows of 1,050 tokens a GPU, three forwards and one recomputed, 2 FLOPs a weight of the layers and
    # token, half of 989.4 TFLOPS; attention, traffic and the output matrix come on top.
    products = 4 * 2 * 36 * 100_930_816 * 64 * 1050 / (0.5 * 989.4e12)
    assert products < found.parts["passes of the update"] < 2 * products
    assert found.parts["reference and old log-probabilities"] == pytest.approx(
        found.parts["passes of the update"] / 4, rel=0.15
    )
    # Decoding reads weights (the embedding is the output matrix) and the cache once a turn; the longest response
    # takes 3,072 turns of at least the engine's 4 ms, and the mean rows' 900 tokens read their own caches.
    weights = 2 * parameters / (0.8 * 3.35e12)
    cache = 64 * 900 * (150 + 450) * kv * 2 / (0.8 * 3.35e12)
    assert 3071 * 4e-3 <= found.parts["rollouts"] < 3072 * (weights + 4e-3) + 3 * cache
    # Memory a GPU: float32 weights, gradients and two states over 8; two whole layers; half the GPU for the engine.
    memory = found.update.memory
    assert memory["weights"] == parameters * 4 / 8 + 2 * 100_930_816 * 4
    assert memory["gradients"] == parameters * 4 / 8 and memory["optimizer"] == parameters * 8 / 8
    assert memory["engine"] == 40e9 and "cache" not in memory
    # Logits of 16,384 packed tokens and their gradients in bfloat16, and a tile of 4,096 in float32 and its own.
    assert memory["logits"] == 2 * 16_384 * 151_936 * 2 + 2 * 4096 * 151_936 * 4
    update = memory["gradients"] + memory["activations"] + memory["logits"]
    assert memory["peak"] == memory["weights"] + memory["optimizer"] + max(40e9, update)


def test_probepo_asks_for_its_budget() -> None:
    found = predicted("qwen3-4b")
    # 64 groups, of which 1 − 2·0.5^8 are mixed, 40 continuations each; a few pivots share a state with none.
    assert found.tokens["probe/continuations"] <= 64 * 40
    assert found.update.cap is not None and found.update.cap.tokens["probe/continuations"] == 64 * 40
    # Replicas stay awake while old log-probabilities are computed, so their logits come on top.
    plain = predicted("qwen3-4b", "grpo")
    assert found.update.memory["peak"] == plain.update.memory["peak"] + 16_384 * 151_936 * 2
    asleep = predicted("qwen3-4b", apportion__probe={"replicas": "wake_again"})
    assert asleep.update.memory["peak"] == plain.update.memory["peak"]


def test_vineppo_probes_at_every_step_of_every_response() -> None:
    found = predicted("qwen3-4b", "vineppo")
    assert found.tokens["probe/continuations"] > 10 * predicted("qwen3-4b").tokens["probe/continuations"]


def test_a_step_of_several_updates_is_all_of_them() -> None:
    once = predicted("qwen3-4b", "grpo")
    twice = predicted("qwen3-4b", "grpo", actor_rollout_ref__actor__ppo_mini_batch_size=32)
    assert twice.updates == 2
    assert twice.tokens == pytest.approx(once.tokens) and twice.parts["rollouts"] == pytest.approx(
        once.parts["rollouts"]
    )
    assert twice.parts["passes of the update"] == pytest.approx(once.parts["passes of the update"], rel=0.15)
    assert twice.parts["optimizer"] == pytest.approx(2 * once.parts["optimizer"])
    again = predicted("qwen3-4b", "grpo", actor_rollout_ref__actor__ppo_epochs=2)
    assert again.updates == 2 and again.parts["rollouts"] == pytest.approx(once.parts["rollouts"])
    assert again.parts["passes of the update"] == pytest.approx(2 * once.parts["passes of the update"], rel=0.01)


def test_twice_the_gpus_halve_the_work_and_not_the_tokens() -> None:
    eight, sixteen = (predicted("deepseekmath-7b", hardware=f"h100x{n}") for n in (8, 16))
    assert sixteen.tokens["tokens/actor"] == eight.tokens["tokens/actor"]
    assert sixteen.parts["passes of the update"] == pytest.approx(eight.parts["passes of the update"] / 2, rel=0.2)
    assert sixteen.update.memory["optimizer"] == eight.update.memory["optimizer"] / 2


def test_a_replica_of_two_devices() -> None:
    one = predicted("deepseekmath-7b")
    two = predicted("deepseekmath-7b", actor_rollout_ref__rollout__tensor_model_parallel_size=2)
    for name in ("tokens/actor", "probe/continuations"):
        assert two.tokens[name] == pytest.approx(one.tokens[name], rel=0.05)
    # Twice the rows over twice the bandwidth, and the sums of two devices' halves on top.
    assert 0.5 * one.parts["probing"] < two.parts["probing"] < 1.6 * one.parts["probing"]
    with pytest.raises(InputError, match="divisor of the 8"):
        predicted("deepseekmath-7b", actor_rollout_ref__rollout__tensor_model_parallel_size=3)


def test_the_cache_of_a_replica_by_hand() -> None:
    llama = ModelShape.llama(32, 4096, 32, 32, 128, 11008, 32000, False)
    half = Serving(256, 1, 0.5, "bfloat16")
    machine = find_hardware("h100x8")
    # 40e9 − 13,476,831,232 bytes of weights are left for 524,288 a token; two devices have 80e9.
    assert half.cache(llama, half.replica(machine)) == 50_588
    both = Serving(256, 2, 0.5, "bfloat16")
    assert both.cache(llama, both.replica(machine)) == int((80e9 - 13_476_831_232) / 524_288)
    assert both.replica(machine).devices == 4 and half.summing([], llama, machine) == 0
    with pytest.raises(InputError, match=r"more than 0\.17"):
        Serving(256, 1, 0.1, "bfloat16").cache(llama, machine)


def test_rows_wait_for_a_slot() -> None:
    from apportion.cost.standin import Workload

    work = Workload(4, 2, 10.0, 10, 3.0, 3, 8, spread=False)
    many, few = (Serving(slots, 1, 0.5, "bfloat16").rollouts(work, 10_000) for slots in (4, 2))
    # Two prompts of 10 tokens once each; then 3 − 1 turns of four rows, or twice 2 turns of two.
    assert many[0].tokens == few[0].tokens == 20
    assert [(call.times, call.tokens) for call in many[1:]] == [(2, 4)]
    assert [(call.times, call.tokens) for call in few[1:]] == [(2, 2), (2, 2)]
    # A cache of 26 tokens holds two rows of 13.
    small = Serving(4, 1, 0.5, "bfloat16").rollouts(work, 26)
    assert [(call.times, call.tokens) for call in small[1:]] == [(2, 2), (2, 2)]


def test_lengths_that_do_not_fit_are_named() -> None:
    config = resolved("qwen3-4b", "grpo")
    for assumed, name in ((Assumed(response=4000), "response"), (Assumed(prompt=2000), "prompt")):
        with pytest.raises(InputError, match=f"assumed {name}"):
            predict_cluster(config, None, find_hardware("h100x8"), assumed)
    longer = predict_cluster(config, None, find_hardware("h100x8"), Assumed(response=1800))
    assert longer.tokens["tokens/actor"] == 64 * 8 * 1800


def test_a_model_that_is_here_is_read_from_its_folder(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4).save_pretrained(
        tmp_path
    )
    found = predicted("qwen3-4b", "grpo", actor_rollout_ref__model__path=str(tmp_path))
    assert found.source == f"{tmp_path}/config.json" and found.update.memory["optimizer"] < 1e8
    with pytest.raises(InputError, match=r"recipe\.model"):
        predicted("qwen3-4b", "grpo", recipe__model=None)


def test_what_is_not_predicted_is_said() -> None:
    with pytest.raises(InputError, match="fsdp"):
        predicted("qwen3-4b", "grpo", actor_rollout_ref__actor__strategy="megatron")
    assert any("Offloading" in note for note in predicted(
        "qwen3-4b", "grpo", actor_rollout_ref__actor__fsdp_config__param_offload=True
    ).notes)  # fmt: skip
    small = predicted("deepseekmath-7b", "grpo", hardware="a100-40x8")
    assert small.update.fits is (small.update.memory["peak"] <= 0.92 * 40e9) and math.isfinite(small.seconds)


def test_recipes_say_what_is_whose() -> None:
    for name in SIZES:
        text = (RECIPES / f"{name}.yaml").read_text()
        assert "[paper" in text and "[ours]" in text and "config.json of" in text
