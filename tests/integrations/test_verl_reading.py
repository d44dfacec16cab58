"""Forward passes with the weights that verl trains: two real FSDP2 ranks against the same model in one process.

Planted faults seen caught: weights kept from an earlier call; the precision that was asked for ignored; distributions
at temperature 1; every rank reading everything, and a share left out; the actor frozen or put in evaluation mode;
random streams moved; another pad id; what one rank, or the engine, spent left out; weights missing and not noticed; a
rank without requests that does not gather; adapters let through; the wrong role's class replaced.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import random
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import verl_run
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from apportion.engines.base import (
    BeliefRequest,
    ConfidenceRequest,
    Cost,
    DivergenceRequest,
    Key,
    Sampling,
    SensitivityRequest,
)
from apportion.engines.scoring import Scorer
from apportion.engines.transformers import TransformersEngine
from apportion.errors import InputError
from apportion.measure.readings import read, share

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed here: run by `make cluster`", allow_module_level=True)

FACTOR = 1.05
# The embedded policy has 20 characters; 0 pads.
VOCABULARY, PAD, PROMPT = 20, 0, 4
SAMPLING = Sampling(stop_ids=(1,), temperature=0.8)
KINDS = ("belief", "confidence", "divergence", "perturb", "gradient")


def asked() -> dict[tuple[str, int], Any]:
    """Requests of every kind about responses of different lengths; OAR's two estimators take turns."""
    rng = random.Random(4)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, VOCABULARY) for _ in range(n))

    found: dict[tuple[str, int], Any] = {}
    for row, n in enumerate((5, 23, 9, 14, 3, 17)):
        whole = ids(PROMPT + n)

        def key(kind: str, row: int = row) -> Key:
            return Key(f"0/{kind}", 3, str(row // 3), row % 3, 0)

        answers = ((5, 6), (7,), (8, 9, 10))
        found["belief", row] = BeliefRequest(
            key("belief"), whole, PROMPT, (0, n // 2, n), (2, 3), answers, row % 2 == 0
        )
        found["confidence", row] = ConfidenceRequest(key("confidence"), whole, PROMPT, (1, n), (2,), (5, 4), 3, 4)
        found["divergence", row] = DivergenceRequest(key("divergence"), whole, PROMPT, ids(PROMPT), ids(PROMPT))
        how = ("perturb", ("last", "answer_mean", "answer_joint")[row // 2]) if row % 2 else ("gradient", "answer_mean")
        found["sensitivity", row] = SensitivityRequest(key("sensitivity"), whole, PROMPT, n - 2, (n - 2, n), *how, 1e-2)
    return found


def kind_of(request: Any) -> str:
    return request.estimator if isinstance(request, SensitivityRequest) else type(request).__name__[:-7].lower()


def plain(model: Any, requests: dict[tuple[str, int], Any]) -> tuple[dict[tuple[str, int], Any], Cost]:
    """In this process, in two batches of the shares that two ranks have, and what both spend."""
    found: dict[tuple[str, int], Any] = {}
    scorer = Scorer(model, PAD, temperature=SAMPLING.temperature)
    engine = TransformersEngine(model, PAD)
    for rank in range(2):
        found |= read(share(requests, rank, 2), scorer, engine, SAMPLING)
    return found, scorer.cost + engine.cost


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reading")


@pytest.fixture(scope="module")
def found(folder: Path) -> Any:
    """What `reading_world` leaves."""
    (folder / "asked.pickle").write_bytes(pickle.dumps((SAMPLING, asked())))
    mark = uuid.uuid4().hex
    env = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")}
    env |= {
        "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
        "VERL_USE_EXTERNAL_MODULES": "apportion.integrations.verl.cpu", "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo", verl_run.MARK: mark,
    }  # fmt: skip
    script = Path(__file__).with_name("reading_world.py")
    # What stands before a run of verl's own, without Ray's settings, which the script has.
    settings = [line for line in verl_run.overrides(folder / "verl") if "ray_kwargs" not in line]
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder), *settings], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", env=env, cwd=folder, start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=500)
    finally:
        verl_run.end_marked(mark)
        process.wait()
    assert process.returncode == 0, out[-4000:]
    return pickle.loads((folder / "found.pickle").read_bytes())


@pytest.fixture(scope="module")
def model(folder: Path, found: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "verl" / "model", dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_readings_are_those_of_the_plain_model(found: Any, model: Any, kind: str) -> None:
    readings, _ = found["first"]
    requests = asked()
    assert list(readings) == list(requests)
    checked = 0
    for at, expected in plain(model, requests)[0].items():
        if kind_of(requests[at]) == kind:
            assert readings[at].key == expected.key == requests[at].key
            torch.testing.assert_close(readings[at].values, expected.values, atol=1e-6, rtol=1e-6)
            checked += len(expected.values)
    assert checked > 10


def test_both_ranks_read_and_a_rank_may_have_nothing_to_read(found: Any) -> None:
    one, two = found["ranks"]
    assert one and two and sorted(one + two) == sorted(asked())
    for at, (readings, cost) in found["alone"].items():
        assert list(readings) == [at] and cost.forwards > 0
        torch.testing.assert_close(readings[at].values, found["first"][0][at].values, atol=1e-5, rtol=1e-5)


def test_order_of_requests_does_not_matter(found: Any) -> None:
    readings, cost = found["permuted"]
    assert cost.generated == found["first"][1].generated
    for at, reading in found["first"][0].items():
        assert readings[at].key == reading.key
        torch.testing.assert_close(readings[at].values, reading.values, atol=1e-5, rtol=1e-5)


def test_weights_are_those_of_the_moment(found: Any, model: Any) -> None:
    """Every weight was made 5 % larger between two calls."""
    scaled = AutoModelForCausalLM.from_config(model.config)
    scaled.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in scaled.parameters():
            parameter.mul_(FACTOR)
    readings, _ = found["shifted"]
    for at, expected in plain(scaled, asked())[0].items():
        torch.testing.assert_close(readings[at].values, expected.values, atol=1e-6, rtol=1e-6)
    moved = [at for at in readings if not torch.allclose(readings[at].values, found["first"][0][at].values, atol=1e-3)]
    assert len(moved) > len(readings) / 2


def test_half_precision_where_it_is_asked_for(found: Any, folder: Path) -> None:
    """A belief in bfloat16 is a plain bfloat16 model's, and off float32 by more than rounding."""
    half = AutoModelForCausalLM.from_pretrained(folder / "verl" / "model", dtype=torch.bfloat16)
    requests = asked()
    expected, _ = plain(half, requests)
    readings, _ = found["bfloat16"]
    for at in requests:
        if at[0] == "belief":
            torch.testing.assert_close(readings[at].values, expected[at].values, atol=1e-6, rtol=1e-6)
    assert any(
        (readings[at].values - found["first"][0][at].values).abs().max() > 1e-3 for at in requests if at[0] == "belief"
    )


def test_nothing_of_the_actor_is_touched(found: Any) -> None:
    for before, after in zip(found["before"], found["after"], strict=True):
        assert before["shard"].keys() == after["shard"].keys()
        assert all(torch.equal(before["shard"][name], after["shard"][name]) for name in before["shard"])
        assert before["learns"] == after["learns"] and all(after["learns"]) and after["grads"] == 0
        assert before["training"] and after["training"]
        assert torch.equal(before["random"][0], after["random"][0]) and before["random"][1] == after["random"][1]
    shapes = [{name: tuple(own.shape) for name, own in each["shard"].items()} for each in found["before"]]
    assert sum(own.numel() for each in found["before"] for own in each["shard"].values()) == 173_760, shapes


def test_what_is_spent_is_all_ranks(found: Any, model: Any) -> None:
    assert found["first"][1] == plain(model, asked())[1]


def engine(config: Any, state: dict[str, torch.Tensor], adapter: Any = None) -> Any:
    """A training engine as far as it is asked: its weights come one by one."""
    left = dict(state)

    def weights() -> Any:
        while left:
            name = next(iter(left))
            yield name, left.pop(name)

    return SimpleNamespace(
        get_per_tensor_param=lambda: (weights(), adapter), is_param_offload_enabled=False, left=left,
        model_config=SimpleNamespace(hf_config=config, trust_remote_code=False),
    )  # fmt: skip


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Any:
    reading = pytest.importorskip("apportion.integrations.verl.reading")
    monkeypatch.setattr(reading, "get_device_id", lambda: "cpu")
    return reading.whole_model


def tied() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, attention_dropout=0.5, architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def same(copy: Any, original: Any) -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(copy.eval()(ids).logits, original.eval()(ids).logits)


def test_tied_heads_come_once_or_twice(whole: Any) -> None:
    original = LlamaForCausalLM(tied())
    state = {name: own.clone() for name, own in original.state_dict().items()}
    assert "lm_head.weight" in state
    same(whole(engine(tied(), state), None, True), original)
    del state["lm_head.weight"]
    same(whole(engine(tied(), state), None, True), original)


def test_experts_come_one_by_one(whole: Any) -> None:
    """verl names each expert's weights as checkpoints do; transformers holds those of a layer in one tensor."""
    unfuse = pytest.importorskip("verl.workers.engine.fsdp.utils").unfuse_moe_params
    config = Qwen3MoeConfig(
        vocab_size=13, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, decoder_sparse_step=1,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    original = Qwen3MoeForCausalLM(config)
    state = dict(unfuse(iter(original.state_dict().items()), config.model_type))
    assert any("experts.3.up_proj" in name for name in state)
    same(whole(engine(config, state), None, True), original)


def test_weights_that_do_not_fit_are_named(whole: Any) -> None:
    state = dict(LlamaForCausalLM(tied()).state_dict())
    lost = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(RuntimeError, match=rf"missing_keys.*{lost}"):
        whole(engine(tied(), {name: own for name, own in state.items() if name != lost}), None, True)
    with pytest.raises(RuntimeError, match=r"unexpected_keys.*model\.extra"):
        whole(engine(tied(), {**state, "model.extra": torch.zeros(1)}), None, True)


def test_a_rank_without_requests_takes_part_and_keeps_nothing(whole: Any) -> None:
    source = engine(tied(), dict(LlamaForCausalLM(tied()).state_dict()))
    assert whole(source, None, False) is None and not source.left


def test_adapters_beside_their_base_are_refused(whole: Any) -> None:
    with pytest.raises(InputError, match=r"lora.merge=True"):
        whole(engine(tied(), {}, adapter={"r": 4}), None, True)


def test_the_actors_class_alone_is_replaced() -> None:
    reading = pytest.importorskip("apportion.integrations.verl.reading")
    import ray
    from verl.experimental.separation.engine_workers import DetachActorWorker
    from verl.trainer.ppo.utils import Role
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from apportion.credit.registry import make_method, method_names

    for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
        for base in (ActorRolloutRefWorker, DetachActorWorker):
            reference = ray.remote(base)
            classes = {role: ray.remote(base), Role.RefPolicy: reference}
            reading.readers_in(classes, make_method("grpo_vps", {}))
            own = classes[role].__ray_actor_class__
            assert issubclass(own, base) and issubclass(own, reading.ReadingWorker) and own is not base
            assert classes[Role.RefPolicy] is reference
    kept = ray.remote(ActorRolloutRefWorker)
    classes = {Role.ActorRollout: kept}
    reading.readers_in(classes, make_method("probepo", {}))
    assert classes == {Role.ActorRollout: kept}
    with pytest.raises(RuntimeError, match="verl's roles have none"):
        reading.readers_in({Role.Critic: kept}, make_method("spae", {}))
    reads = {name for name in method_names() if reading.needs_readings(make_method(name, {}))}
    assert {"grpo_vps", "oar_p", "oar_g", "spae", "prpo"} == reads


def test_a_precision_that_is_none_is_refused() -> None:
    reading = pytest.importorskip("apportion.integrations.verl.reading")
    with pytest.raises(InputError, match="dtype: got 'float16'"):
        reading.Readers(None, SAMPLING, PAD, dtype="float16")
    assert reading.Readers(None, SAMPLING, PAD).read({}) == ({}, reading.Cost())
