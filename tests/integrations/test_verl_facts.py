"""What the plugin relies on in verl and no signature shows: each test fails with the name of what changed."""

import ast
import asyncio
import copy
import inspect
import textwrap
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed; `make cluster` installs it and runs this")

import numpy as np
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.protocol import DataProto
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1 import agent_loop_tq, replay_buffer, trainer_base
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.utils import losses
from verl.workers.utils.padding import response_from_nested, response_to_nested

PPOTrainer = trainer_base.PPOTrainer
# verl has the class behind Ray's decorator only.
WORKER = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class


class Calls:
    """Takes every call, by name and in order; `answers` holds what some of them return."""

    def __init__(self, answers=None, called=None, **attributes):
        self.called = [] if called is None else called
        self.answers = answers or {}
        self.__dict__.update(attributes)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.called.append(name)
            answer = self.answers.get(name)
            return answer(*args, **kwargs) if callable(answer) else answer

        return call


def tree_of(function):
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def called_in(function):
    """Names of the methods and functions that are called, as they stand in its source."""
    nodes = [node for node in ast.walk(tree_of(function)) if isinstance(node, ast.Call)]
    nodes.sort(key=lambda node: (node.lineno, node.col_offset))
    return [getattr(node.func, "attr", getattr(node.func, "id", "")) for node in nodes]


def nested(*given, dtype=torch.float32):
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in given], layout=torch.jagged)


class Queue:
    """TransferQueue's calls over a dict of rows."""

    def __init__(self, rows=None):
        self.rows, self.tags, self.asked = rows or {}, {}, []

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        self.asked.append(select_fields)
        names = [name for name in self.rows[keys[0]] if select_fields is None or name in select_fields]
        if select_fields is None:
            return [self.rows[key] for key in keys]
        columns = {}
        for name in names:
            values = [self.rows[key][name] for key in keys]
            flat = isinstance(values[0], torch.Tensor)
            columns[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged) if flat else values
        return TensorDict(columns, batch_size=len(keys))

    def kv_batch_put(self, keys, partition_id, fields=None, tags=None):
        for i, key in enumerate(keys):
            row = self.rows.setdefault(key, {})
            for name, values in fields.items():
                row[name] = values[i]
            if tags:
                self.tags[key] = tags[i]
        return KVBatchMeta(keys=list(keys), tags=[{} for _ in keys], partition_id=partition_id)

    async def async_kv_batch_put(self, keys, fields, tags, partition_id):
        self.kv_batch_put(keys, partition_id, fields, tags)


# The order of a step.


def test_a_step_samples_then_balances_then_computes_log_probabilities_then_advantages_then_updates():
    batch = KVBatchMeta(keys=[], tags=[], partition_id="train")
    methods = ("_balance_batch", "_compute_old_log_prob", "_compute_ref_log_prob", "_compute_values",
               "_compute_advantage", "_update_critic", "_update_actor")  # fmt: skip
    config = {"actor_rollout_ref": {"rollout": {"temperature": 0.7}}, "trainer": {"critic_warmup": 0}}
    trainer = Calls(
        {name: lambda batch, metrics: batch for name in methods},
        config=OmegaConf.create(config),
        global_steps=1, use_reference_policy=True, use_critic=True,
        reward_loop_manager=SimpleNamespace(reward_loop_worker_handles=[]),
    )  # fmt: skip
    asked = {}

    def sample(**kwargs):
        trainer.called.append("sample")
        asked.update(kwargs)
        return batch, {}

    trainer.replay_buffer = SimpleNamespace(sample=sample)
    assert PPOTrainer._step_once(trainer, {}, {}, 4) is batch
    assert trainer.called == ["on_sample_begin", "sample", "on_sample_end", *methods]
    assert asked == {"global_steps": 1, "partition_id": "train", "batch_size": 4}


def test_fit_saves_then_wakes_the_replicas_then_counts_then_clears():
    order = ["_reissue_inflight_prompts", "on_train_begin", "on_step_begin", "step", "_save_checkpoint", "on_step_end",
             "_compute_metrics", "kv_clear", "log"]  # fmt: skip
    found = called_in(PPOTrainer.fit)
    assert not [f"PPOTrainer.fit no longer calls {name}" for name in order if name not in found]
    places = [len(found) - 1 - found[::-1].index(name) for name in order]
    assert places == sorted(places), f"PPOTrainer.fit calls in another order: {found}"


@pytest.mark.parametrize(
    ("cls", "method", "expected"),
    [
        (PPOTrainerSync, "on_sample_end", ["sleep_replicas"]),
        (PPOTrainerSync, "on_step_end", ["update_weights"]),
        (PPOTrainerColocateAsync, "on_sample_end", ["abort_replicas", "sleep_replicas"]),
        (PPOTrainerColocateAsync, "on_step_end", ["update_weights", "resume_generation_replicas"]),
        (PPOTrainerSeparateAsync, "on_sample_end", []),
    ],
)
def test_when_replicas_sleep_and_wake(cls, method, expected):
    manager = Calls()
    trainer = SimpleNamespace(
        checkpoint_manager=manager, curr_step_profile=False, global_steps=3, timing_raw={}, _sample_start=0.0,
        _step_sample_wait_seconds=0.0,
    )  # fmt: skip
    getattr(cls, method)(trainer)
    assert manager.called == expected, f"{cls.__name__}.{method}"


def test_whom_the_trainers_ask_for_generation():
    asked = []
    manager = SimpleNamespace(get_client=lambda client_cls=None: asked.append(client_cls))
    trainer = SimpleNamespace(llm_server_manager=manager, standalone_server_manager=manager)
    for cls in (PPOTrainerSync, PPOTrainerColocateAsync, PPOTrainerSeparateAsync):
        cls.get_llm_client(trainer)
    assert asked == [None, FullyAsyncLLMServerClient, FullyAsyncLLMServerClient]
    handles = SimpleNamespace(reward_loop_manager=SimpleNamespace(reward_loop_worker_handles="handles"))
    assert PPOTrainer.get_reward_handles(handles) == "handles"


def test_verl_branches_on_its_own_names_of_the_modes():
    """Why a trainer of ours passes itself off under verl's name for it."""
    found = set()
    for module in (trainer_base, replay_buffer):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Compare) and getattr(node.left, "attr", "") == "trainer_mode":
                found |= {each.value for each in node.comparators if isinstance(each, ast.Constant)}
    assert found == {"sync"}, f"trainer_mode is compared with {found}"


KEPT = ("checkpoint_manager", "reward_loop_manager", "actor_rollout_wg", "llm_server_manager", "tokenizer",
        "timing_raw", "role_worker_mapping", "local_trigger_step", "global_steps")  # fmt: skip


def test_what_the_trainer_keeps_under_which_name():
    set_here = {
        node.attr for node in ast.walk(ast.parse(inspect.getsource(PPOTrainer)))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }  # fmt: skip
    assert not [f"PPOTrainer.{name} is no longer set" for name in KEPT if name not in set_here]


# Rows.


def test_the_key_and_the_tags_of_a_row(monkeypatch):
    queue = Queue()
    monkeypatch.setattr(agent_loop_tq, "tq", queue)

    async def nothing(*args, **kwargs): ...

    def output(versions):
        return AgentLoopOutput(
            prompt_ids=[1, 2, 3], response_ids=[4, 5], response_mask=[1, 0], response_logprobs=[-0.5, 0.0],
            reward_score=1.0, num_turns=2, metrics={},
            extra_fields={"min_global_steps": versions[0], "max_global_steps": versions[1], "reward_extra_info": {}},
        )  # fmt: skip

    worker = SimpleNamespace(
        _compute_score=nothing, _compute_teacher_logprobs=nothing,
        _compute_multi_modal_inputs=lambda output, ids: {},
        _compute_position_ids=lambda ids, mask, inputs: torch.arange(5)[None],
    )  # fmt: skip
    kwargs = {"uid": "a_b", "session_id": 3, "global_steps": 7, "index": 0}
    asyncio.run(WORKER._agent_loop_postprocess(worker, [output((5, 6)), output((6, 6))], False, **kwargs))
    assert list(queue.rows) == ["a_b_3_0", "a_b_3_1"], "the row key is no longer {uid}_{session}_{index}"
    tags = queue.tags["a_b_3_0"]
    assert {name: tags[name] for name in ("prompt_len", "response_len", "seq_len")} == {
        "prompt_len": 3, "response_len": 2, "seq_len": 5,
    }  # fmt: skip
    assert (tags["min_global_steps"], tags["max_global_steps"]) == (5, 6)
    row = queue.rows["a_b_3_0"]
    assert row["prompts"].tolist() == [1, 2, 3] and row["responses"].tolist() == [4, 5]
    assert row["response_mask"].tolist() == [1, 0] and row["rm_scores"].tolist() == [0.0, 1.0]
    assert {"uid", "index"} <= {*row}


def test_padding_rows_are_tagged_have_a_uid_of_their_own_and_nothing_to_train(monkeypatch):
    row = {
        "prompts": torch.tensor([1, 2]), "responses": torch.tensor([3, 4]), "input_ids": torch.tensor([1, 2, 3, 4]),
        "position_ids": torch.arange(4), "response_mask": torch.tensor([1, 1]), "loss_mask": torch.tensor([1, 1]),
        "rm_scores": torch.tensor([0.0, 1.0]), "rollout_log_probs": torch.tensor([-0.1, -0.2]), "uid": "u",
    }  # fmt: skip
    queue = Queue({f"u_{i}_0": dict(row) for i in range(3)})
    monkeypatch.setattr(padding_utils, "tq", queue)
    columns = lambda rows: {name: [row[name] for row in rows] for name in rows[0]}  # noqa: E731
    monkeypatch.setattr(padding_utils, "list_of_dict_to_tensordict", columns)
    meta = KVBatchMeta(keys=list(queue.rows), tags=[{"seq_len": 4}] * 3, partition_id="train")
    grown = padding_utils.upsample_batch_to_divisible_size(meta, 4, 9)
    assert len(grown) == 4 and grown.keys[:3] == meta.keys
    assert [tag.get("is_padding", False) for tag in grown.tags] == [False, False, False, True]
    padding = queue.rows[grown.keys[3]]
    assert padding["uid"] != "u" and grown.keys[3] == f"{padding['uid']}_0_0"
    assert padding["response_mask"].sum() == 0 and padding["rm_scores"].sum() == 0


def test_grpo_reads_the_last_output_of_a_session_in_the_order_of_the_rows():
    mask = torch.ones(4, 2, dtype=torch.int64)
    scores = torch.tensor([[0, 7.0], [0, 1], [0, 0], [0, 3]])
    data = DataProto.from_dict(
        {"token_level_rewards": scores, "response_mask": mask}, {"uid": np.array(["u"] * 4, object)}
    )
    keys = ["u_0_0", "u_1_0", "u_2_0", "u_0_1"]
    out = compute_advantage_for_multi_trajectories(data, keys, "grpo", norm_adv_by_std_in_grpo=False)
    mean = 4 / 3
    assert out.batch["advantages"][:, 0].tolist() == pytest.approx([3 - mean, 1 - mean, -mean, 3 - mean])


def test_what_a_step_reads_and_writes_of_log_probabilities(monkeypatch):
    """`log_probs` and `entropy` of whole sequences are shifted to the response: place t − 1 made token t."""
    whole = torch.arange(4.0)
    queue = Queue({"u_0_0": {"log_probs": -whole, "entropy": whole, "response_mask": torch.tensor([1, 1])}})
    monkeypatch.setattr(trainer_base, "tq", queue)
    config = OmegaConf.create(
        {
            "algorithm": {},
            "actor_rollout_ref": {
                "rollout": {"temperature": 1.0, "calculate_log_probs": False},
                "actor": {"loss_agg_mode": "token-mean", "loss_scale_factor": None},
            },
        }
    )
    trainer = SimpleNamespace(config=config, actor_rollout_wg=SimpleNamespace(compute_log_prob=lambda batch: batch))
    meta = KVBatchMeta(keys=["u_0_0"], tags=[{}], partition_id="train")
    PPOTrainer._compute_old_log_prob(trainer, meta, {})
    assert queue.rows["u_0_0"]["old_log_probs"].tolist() == [-1.0, -2.0]
    assert queue.rows["u_0_0"]["entropy"].tolist() == [1.0, 2.0]


def test_what_a_step_reads_and_writes_of_advantages(monkeypatch):
    rows = {
        f"u_{i}_0": {"response_mask": torch.ones(i + 1).long(), "rm_scores": torch.tensor([0.0] * i + [float(i)])}
        for i in range(3)
    }
    queue = Queue(rows)
    get = queue.kv_batch_get

    def with_uid(keys, partition_id, select_fields):
        found = get(keys, partition_id, select_fields)
        found["uid"] = ["u"] * len(keys)
        return found

    monkeypatch.setattr(trainer_base, "tq", SimpleNamespace(kv_batch_get=with_uid, kv_batch_put=queue.kv_batch_put))
    config = OmegaConf.create(
        {
            "algorithm": {"use_kl_in_reward": False, "adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0,
                          "norm_adv_by_std_in_grpo": False},
            "actor_rollout_ref": {"rollout": {"n": 3}},
        }
    )  # fmt: skip
    meta = KVBatchMeta(keys=list(rows), tags=[{}] * 3, partition_id="train")
    PPOTrainer._compute_advantage(SimpleNamespace(config=config), meta, {})
    assert [rows[key]["advantages"].tolist() for key in rows] == [[-1.0], [0.0, 0.0], [1.0, 1.0, 1.0]]


def test_the_shift_between_a_sequence_and_its_response():
    mask = nested([1, 1], [1], dtype=torch.int64)
    sequence = nested([0, 1, 2, 3], [10, 11, 12])
    assert [row.tolist() for row in response_from_nested(sequence, mask).unbind()] == [[1, 2], [11]]
    padded = torch.tensor([[5.0, 6, 7], [8, 9, 9]])
    assert [row.tolist() for row in response_to_nested(padded, mask).unbind()] == [[5, 6], [8]]


# Generation and the loss.


def test_a_request_goes_to_the_server_of_its_id_and_comes_back_with_the_version_of_the_weights():
    seen = {}

    async def answer(**kwargs):
        seen.update(copy.deepcopy(kwargs))
        return TokenOutput(token_ids=[1], stop_reason="completed", extra_fields={"global_steps": 12})

    async def server(request_id, **fields):
        seen["route"] = request_id
        return "server", SimpleNamespace(generate=SimpleNamespace(remote=answer))

    async def fields():
        return []

    balancer = SimpleNamespace(
        require_acquire_fields=SimpleNamespace(remote=fields), require_release_fields=SimpleNamespace(remote=fields),
        acquire_server=SimpleNamespace(remote=server), release_server=SimpleNamespace(remote=lambda **kwargs: None),
    )  # fmt: skip
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "other", "response_length": 64}}})
    for cls in (LLMServerClient, FullyAsyncLLMServerClient):
        client = cls(config, balancer)
        asked = {"max_tokens": 5, "seed": 3}
        output = asyncio.run(client.generate("route", prompt_ids=[7, 8], sampling_params=asked))
        assert seen["route"] == "route" and seen["prompt_ids"] == [7, 8] and asked == {"max_tokens": 5, "seed": 3}
        assert seen["sampling_params"] == asked and output.token_ids == [1]
        assert output.extra_fields["min_global_steps"] == output.extra_fields["max_global_steps"] == 12


def test_what_rollouts_are_sampled_with():
    """Probes are sampled with the same; a further option here would be missing there."""
    [made] = [
        node.value for node in ast.walk(tree_of(WORKER.generate_sequences))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "sampling_params"
    ]  # fmt: skip
    assert {each.arg: ast.unparse(each.value) for each in made.keywords} == {
        "temperature": "config.temperature", "top_p": "config.top_p", "top_k": "config.top_k",
        "repetition_penalty": "1.0", "logprobs": "config.calculate_log_probs",
    }  # fmt: skip


def test_the_loss_is_given_every_tokens_own_advantage():
    tree = tree_of(losses.ppo_loss)
    [call] = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "policy_loss_fn"]
    assert [each.arg for each in call.keywords] == [
        "old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights",
    ], "the calling convention of a policy loss"  # fmt: skip
    [advantages] = [
        ast.unparse(n.value) for n in ast.walk(tree)
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "advantages"
    ]  # fmt: skip
    assert advantages == "data['advantages']"
