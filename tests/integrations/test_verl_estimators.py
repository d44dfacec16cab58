"""Methods that read nothing but rewards, as verl's estimators: against verl's own, by hand, and by the laws."""

import random
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("verl", reason="verl is not installed; `make cluster` installs it and runs this")

from omegaconf import OmegaConf
from verl.protocol import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from apportion.credit import registry
from apportion.credit.cw_grpo import CWGRPO
from apportion.errors import InputError
from apportion.groups import grpo_base
from apportion.integrations.verl import estimators
from apportion.measure.evidence import Evidence
from apportion.rollouts import Rollouts

LOCAL = {"grpo", "dr_grpo", "rloo", "opo", "reinforce_pp", "reinforce_pp_baseline", "avspo"}
SIX = sorted(LOCAL - {"avspo"})
PLUGIN = Path(__file__).parents[1] / "plugins" / "apportion-ramp"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """verl's table of estimators with ours, as it was after the test."""
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))
    estimators.register()


def algorithm(norm=True, gamma=1.0, **settings):
    """verl's `algorithm` block as its trainer has it: no key can be read that is not there."""
    block = {"gamma": gamma, "norm_adv_by_std_in_grpo": norm, "use_kl_in_reward": False}
    config = OmegaConf.create(block | ({"apportion": settings} if settings else {}))
    OmegaConf.set_struct(config, True)
    return config


def rows(*given, width=None):
    """(uid, reward, mask) rows as verl's padded tensors; the reward is on the last trainable token."""
    width = width or max(len(mask) for _, _, mask in given)
    mask = torch.zeros(len(given), width, dtype=torch.int64)
    rewards = torch.zeros(len(given), width)
    for i, (_, reward, row) in enumerate(given):
        mask[i, : len(row)] = torch.tensor(row)
        rewards[i, max((t for t, m in enumerate(row) if m), default=0)] = reward
    return {"token_level_rewards": rewards, "response_mask": mask, "index": np.array([g for g, *_ in given], object)}


def ours(name, batch, config=None):
    advantage, returns = core_algos.get_adv_estimator_fn(f"apportion_{name}")(**batch, config=config or algorithm())
    assert torch.equal(advantage, returns) and advantage.dtype == torch.float32
    assert advantage.shape == batch["response_mask"].shape
    assert (advantage[batch["response_mask"] == 0] == 0).all()
    return advantage


def verls(name, batch, config=None, **rest):
    copy = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    return core_algos.get_adv_estimator_fn(name)(**copy, config=config or algorithm(), **rest)[0]


def first(advantage, batch):
    """[R] of each row the advantage of its first trainable token; 0 where it has none."""
    return advantage[torch.arange(len(advantage)), batch["response_mask"].argmax(1)].tolist()


def drawn(seed, sizes=(1, 2, 3, 8), reward=None):
    """Ragged groups, their members in any order, masks with gaps; every response with `reward` where it is given."""
    rng = random.Random(seed)
    found = []
    for _ in range(rng.randint(1, 5)):
        uid = str(uuid.UUID(int=rng.getrandbits(128)))
        for _ in range(rng.choice(sizes)):
            mask = [int(rng.random() < 0.7) for _ in range(rng.randint(0, 8))] + [1]
            found.append((uid, rng.gauss(0, 1) if reward is None else reward, mask))
    rng.shuffle(found)
    return rows(*found, width=11)


# What is registered.


def test_every_method_without_needs_is_an_estimator_and_no_other():
    found = {name.removeprefix("apportion_") for name in core_algos.ADV_ESTIMATOR_REGISTRY if "apportion_" in name}
    assert found == {name for name in registry.method_names() if not registry.method_class(name).needs} >= LOCAL
    assert not [name for name in core_algos.POLICY_LOSS_REGISTRY if "apportion" in name]
    before = dict(core_algos.ADV_ESTIMATOR_REGISTRY)
    estimators.register()
    assert before == core_algos.ADV_ESTIMATOR_REGISTRY


def with_entry_points(monkeypatch, **paths):
    monkeypatch.setattr(registry, "_paths", lambda: {**registry.BUILT_IN, **paths})


def test_a_method_of_another_package_comes_too(monkeypatch):
    """Ramp with slope .5 weighs three trainable tokens .5, 1, 1.5; a gap between them takes no part."""
    monkeypatch.syspath_prepend(PLUGIN)
    with_entry_points(monkeypatch, ramp="apportion_ramp:Ramp")
    estimators.register()
    batch = rows(("a", 1, [1, 0, 1, 1]), ("a", 0, [1]))
    advantage = ours("ramp", batch, algorithm(norm=False))
    assert advantage[0].tolist() == [0.25, 0, 0.5, 0.75] and advantage[1].tolist() == [-0.5, 0, 0, 0]
    assert ours("ramp", batch, algorithm(norm=False, slope=0))[0].tolist() == [0.5, 0, 0.5, 0.5]


def test_a_method_that_cannot_be_loaded_is_left_out_aloud(monkeypatch, caplog):
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", {})
    with_entry_points(monkeypatch, broken="no_such_package:Method")
    with caplog.at_level("WARNING"):
        estimators.register()
    assert "broken" in caplog.text and "no_such_package" in caplog.text
    assert {*core_algos.ADV_ESTIMATOR_REGISTRY} == {f"apportion_{name}" for name in LOCAL}


# Against verl's own.


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.booleans(), st.sampled_from([None, 0, 1, 0.9]))
def test_grpo_is_verls_bit_for_bit(seed, norm, equal):
    """Groups of one and groups that agree included; bits as they are, signs of 0 aside."""
    batch = drawn(seed, reward=equal)
    expected = verls("grpo", batch, norm_adv_by_std_in_grpo=norm)
    assert torch.equal(ours("grpo", batch, algorithm(norm)), expected)
    assert torch.equal(ours("grpo", batch, algorithm(norm, ddof=1, epsilon=1e-6)), expected)


@settings(max_examples=40)
@given(st.integers(0, 2**31))
def test_where_the_conventions_agree_so_do_the_numbers(seed):
    """Groups of two and more whose rewards differ."""
    batch = drawn(seed, sizes=(2, 3, 8))
    assert torch.equal(ours("dr_grpo", batch), verls("grpo", batch, norm_adv_by_std_in_grpo=False))
    for name, theirs in (("rloo", "rloo"), ("opo", "opo"), ("reinforce_pp_baseline", "reinforce_plus_plus_baseline")):
        assert torch.allclose(ours(name, batch), verls(theirs, batch), rtol=1e-5, atol=2e-6), name


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from([1.0, 0.9, 0.5]))
def test_reinforce_pp_is_verls(seed, gamma):
    """With its discount, which does not count masked tokens."""
    batch, config = drawn(seed, sizes=(2, 3, 8)), algorithm(gamma=gamma)
    expected = verls("reinforce_plus_plus", batch, config)
    assert torch.allclose(ours("reinforce_pp", batch, config), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", SIX)
def test_through_verls_own_trainer_function(name):
    """What `_compute_advantage` calls, with the configuration that it gives."""
    batch = drawn(3)
    data = DataProto.from_dict(
        tensors={key: batch[key].clone() for key in ("token_level_rewards", "response_mask")},
        non_tensors={"uid": batch["index"]},
    )
    seen = {uid: -1 for uid in batch["index"]}
    keys = []
    for uid in batch["index"]:
        seen[uid] += 1
        keys.append(f"{uid}_{seen[uid]}_0")
    out = compute_advantage_for_multi_trajectories(
        data, batch_keys=keys, adv_estimator=f"apportion_{name}", gamma=1.0, lam=1.0, num_repeat=8,
        norm_adv_by_std_in_grpo=True, config=algorithm(),
    )  # fmt: skip
    assert torch.equal(out.batch["advantages"], ours(name, batch))
    assert torch.equal(out.batch["returns"], out.batch["advantages"])


# By hand.


def test_numbers_by_hand():
    """Rewards 1, 0, 0, 0 of lengths 1, 2, 3, 4: σ .5. OPO's baseline is 1/10; RLOO's of the first 0, of others 1/3."""
    batch = rows(("a", 1, [1]), ("a", 0, [1, 1]), ("a", 0, [1, 1, 1]), ("a", 0, [1] * 4))
    expected = {
        "grpo": [0.75 / 0.500001, -0.25 / 0.500001],
        "dr_grpo": [0.75, -0.25],
        "rloo": [1, -1 / 3],
        "opo": [0.9, -0.1],
        # Ten tokens, of which one has a return of 1: mean .1, sample deviation √(.9/9) = .316228.
        "reinforce_pp": [0.9 / 0.1**0.5, -0.1 / 0.1**0.5],
        # .75 once and −.25 nine times: mean −.15, distances .9 and −.1, so the same deviation.
        "reinforce_pp_baseline": [0.9 / 0.1**0.5, -0.1 / 0.1**0.5],
    }
    assert {*expected} == {*SIX}
    for name, (right, wrong) in expected.items():
        assert first(ours(name, batch), batch) == pytest.approx([right, wrong, wrong, wrong], abs=1e-6), name


def test_a_discount_by_hand():
    """γ = .5, one response of three trainable tokens around a gap, reward 1: returns .25, .5, 1; the other's are 0."""
    batch = rows(("a", 1, [1, 1, 0, 1]), ("b", 0, [1]))
    mean = 1.75 / 4
    deviation = (sum((x - mean) ** 2 for x in (0.25, 0.5, 1, 0)) / 3) ** 0.5
    white = [(x - mean) / deviation for x in (0.25, 0.5, 0, 1, 0)]
    advantage = ours("reinforce_pp", batch, algorithm(gamma=0.5))
    assert advantage[0].tolist() == pytest.approx([white[0], white[1], 0, white[3]], abs=1e-6)
    assert advantage[1].tolist() == pytest.approx([white[4], 0, 0, 0], abs=1e-6)


def test_alone_or_all_equal():
    """verl's grpo of a group of one is its reward, and of fifteen times .9 a residue; the others have exactly 0."""
    alone = [("one", 3.0, [1, 1])]
    equal = [(f"{i // 15}", 0.9, [1]) for i in range(15)]
    batch = rows(*alone, *equal)
    assert first(ours("grpo", batch), batch)[0] == pytest.approx(3.0, abs=1e-5)
    for name in ("dr_grpo", "rloo", "opo"):
        assert (ours(name, batch) == 0).all(), name
    mixed = rows(*alone, *equal, ("m", 1, [1]), ("m", 0, [1]))
    assert (ours("reinforce_pp_baseline", mixed)[:16] == 0).all()
    assert (ours("reinforce_pp_baseline", mixed)[16:, 0] != 0).all()


# The laws.


def cut(batch, keep):
    return {key: value[keep] for key, value in batch.items()}


@pytest.mark.parametrize("name", SIX)
@pytest.mark.parametrize("reward", [0.0, 100.0, float("nan")])
@pytest.mark.parametrize("shares", [False, True])
def test_padding_rows_change_nothing(name, reward, shares):
    """verl's: no trainable token, a uid of their own. Even with the uid of a group and a reward they are no members."""
    batch = drawn(5, sizes=(2, 3, 8))
    uid = str(batch["index"][0]) if shares else f"pad{uuid.uuid4().hex}"
    pad = {
        "token_level_rewards": torch.tensor([[reward] + [0.0] * 10] * 3),
        "response_mask": torch.zeros(3, 11, dtype=torch.int64),
        "index": np.array([uid] * 3, object),
    }
    joined = {
        key: np.concatenate([pad[key], batch[key]]) if key == "index" else torch.cat([pad[key], batch[key]])
        for key in batch
    }
    advantage = ours(name, joined)
    assert torch.equal(advantage[3:], ours(name, batch))
    assert (advantage[:3] == 0).all()


@pytest.mark.parametrize("name", SIX)
def test_a_response_without_a_verdict_is_in_no_statistic(name):
    batch = drawn(11, sizes=(4,))
    lost = [0, 5]
    kept = [i for i in range(len(batch["index"])) if i not in lost]
    batch["token_level_rewards"][lost, 0] = float("nan")
    advantage = ours(name, batch)
    assert (advantage[lost] == 0).all()
    assert torch.equal(advantage[kept], ours(name, cut(batch, kept)))


@pytest.mark.parametrize("name", SIX)
def test_no_verdict_at_all(name):
    batch = rows(("a", float("nan"), [1, 1]), ("a", float("nan"), [1]))
    assert (ours(name, batch) == 0).all()


@pytest.mark.parametrize("name", sorted({*SIX} - {"reinforce_pp"}))
def test_who_is_left_alone_in_a_group_has_nothing_to_be_compared_with(name):
    """verl's rule for a group of one is for prompts that were answered once."""
    batch = rows(("a", 1, [1, 1]), ("a", float("nan"), [1]), ("b", 1, [1]), ("b", 1, [0]), ("c", 1, [1]), ("c", 0, [1]))
    advantage = ours(name, batch)
    assert (advantage[:4] == 0).all() and (advantage[4:, 0] != 0).all()


@pytest.mark.parametrize("name", SIX)
@pytest.mark.parametrize("seed", range(12))
def test_the_order_of_rows_changes_nothing(name, seed):
    """To 1e-5: the base is verl's, whose float32 sums know their order."""
    batch = drawn(seed)
    order = random.Random(seed).sample(range(len(batch["index"])), len(batch["index"]))
    assert torch.allclose(ours(name, cut(batch, order)), ours(name, batch)[order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SIX)
def test_the_width_changes_nothing(name):
    batch = drawn(2)
    wide = {key: value if key == "index" else torch.nn.functional.pad(value, (0, 5)) for key, value in batch.items()}
    assert torch.equal(ours(name, wide)[:, :11], ours(name, batch))


@pytest.mark.parametrize("name", SIX)
def test_uids_of_any_kind(name):
    """Equal and hashable is all they have to be; objects, whole numbers, a list, a tensor."""
    batch = drawn(7, sizes=(2, 3, 8))
    number = {uid: i for i, uid in enumerate(dict.fromkeys(batch["index"]))}
    ids = [number[uid] for uid in batch["index"]]
    expected = ours(name, batch)
    for index in (ids, torch.tensor(ids), np.array(ids), np.array([(i, "x") for i in ids] + [None], object)[:-1]):
        assert torch.equal(ours(name, batch | {"index": index}), expected)


def test_nothing_of_verls_is_written_to():
    batch = drawn(9)
    copies = [batch["token_level_rewards"].clone(), batch["response_mask"].clone()]
    for name in SIX:
        ours(name, batch)
    assert torch.equal(copies[0], batch["token_level_rewards"]) and torch.equal(copies[1], batch["response_mask"])


def test_masks_of_any_type():
    batch = drawn(4)
    for dtype in (torch.bool, torch.float32, torch.int32):
        other = batch | {"response_mask": batch["response_mask"].to(dtype)}
        assert torch.equal(ours("grpo", other), ours("grpo", batch))


# Settings, and what is refused.


def refused(name, batch=None, config=None):
    with pytest.raises(InputError) as error:
        core_algos.get_adv_estimator_fn(f"apportion_{name}")(**(batch or drawn(1)), config=config or algorithm())
    return error.value


def test_settings_reach_the_method():
    """Ten tokens with one return of 1: sample deviation √.1, and 1 added to it; the population's is .3."""
    batch = rows(("a", 1, [1]), ("a", 0, [1] * 9))
    assert first(ours("reinforce_pp", batch, algorithm(epsilon=1.0)), batch)[0] == pytest.approx(0.9 / (0.1**0.5 + 1))
    assert first(ours("reinforce_pp", batch, algorithm(ddof=0)), batch)[0] == pytest.approx(3)


def test_the_base_is_verls_and_so_are_its_settings():
    error = refused("rloo", config=algorithm(epsilon=1e-4))
    assert error.field == "algorithm.apportion.epsilon" and "verl's" in error.expected
    assert refused("grpo", config=algorithm(ddof=0)).field == "algorithm.apportion.ddof"
    assert refused("grpo", config=algorithm(ddof="none")).field == "algorithm.apportion.ddof"
    twice = OmegaConf.create({"gamma": 0.5, "apportion": {"gamma": 1}})
    assert "algorithm.gamma" in str(refused("reinforce_pp", config=twice))


def test_an_unknown_setting_is_named_with_the_key_that_was_written():
    error = refused("reinforce_pp", config=algorithm(epsilom=1e-4))
    assert error.field == "algorithm.apportion.epsilom" and "did you mean 'epsilon'" in str(error)
    assert refused("reinforce_pp", config=algorithm(epsilon=-1)).field == "algorithm.apportion.epsilon"
    assert refused("grpo", config=OmegaConf.create({"apportion": "fast"})).field == "algorithm.apportion"


def test_other_forms_of_verls_configuration():
    batch = drawn(6)
    expected = ours("grpo", batch)
    for config in (AlgoConfig(), OmegaConf.create({}), {"apportion": {"ddof": 1}}):
        assert torch.equal(ours("grpo", batch, config), expected)
    advantage, _ = core_algos.get_adv_estimator_fn("apportion_grpo")(**batch)
    assert torch.equal(advantage, expected)


def test_what_is_on_the_command_line_gets_through_verls_own_configuration():
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", ["algorithm.adv_estimator=apportion_rloo", "+algorithm.apportion.ddof=1"])
    batch = drawn(8)
    assert torch.equal(ours("rloo", batch, config.algorithm), ours("rloo", batch))


def test_a_method_with_a_memory_is_refused_and_the_mode_that_has_it_named():
    error = refused("avspo")
    assert error.field == "algorithm.adv_estimator" and error.got == "apportion_avspo"
    assert "trainer_mode=apportion_sync" in error.fix and "+apportion.method=avspo" in error.fix


def test_a_reward_before_the_end_is_refused_where_it_would_be_discounted_from_the_end():
    """A KL term in the reward is one a token. Those that sum it, as verl's do, take it."""
    batch = rows(("a", 1, [1, 1, 1]), ("a", 0, [1, 1]))
    batch["token_level_rewards"][1, 0] = -0.25
    error = refused("reinforce_pp", batch)
    assert error.field == "token_level_rewards of row 1" and "-0.25 at position 0" in error.got
    assert "use_kl_in_reward" in error.fix
    assert torch.equal(ours("grpo", batch), verls("grpo", batch))


def test_rewards_that_are_no_numbers_and_rows_without_group():
    batch = rows(("a", float("inf"), [1]), ("a", 0, [1]))
    assert refused("grpo", batch).field == "reward of row 0"
    batch = drawn(1)
    assert refused("grpo", batch | {"index": None}).field == "uid"
    assert refused("grpo", batch | {"index": batch["index"][1:]}).field == "uid"
    expected = ours("reinforce_pp", batch)
    assert torch.equal(ours("reinforce_pp", batch | {"index": None}), expected)


def test_weights_of_a_micro_batch_are_others():
    """Why cw_grpo is no policy loss: of the two responses of a group, each by itself, all weights are 1."""
    rollouts = Rollouts.from_lists(
        [[1, 2, 3], [4, 5, 6]], ["a", "a"], [1, 0], old_logprob=[[-0.1, -2, -0.05], [-0.3, -1.5, -0.2]]
    )
    base = grpo_base(rollouts)

    def assigned(rows):
        part = rollouts.select(rows)
        own = type(base)(base.advantage[rows], base.mean[rows], base.scale[rows], base.live[rows])
        return CWGRPO().assign(part, Evidence(), own).token

    whole, split = assigned([0, 1]), torch.cat([assigned([0]), assigned([1])])
    assert torch.equal(split, rollouts.spread(base.advantage))
    assert (whole - split).abs().max() > 0.1
