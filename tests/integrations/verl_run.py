"""Real runs of verl on this machine's CPU, for tests: a small model, its problems, and a command that cleans up.

The model is the embedded policy, which answers about a third of these problems, with a chat template that leaves a
prompt as it is. Each rank and each replica is a process of its own; Ray believes in as many GPUs as there are ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

# The plain content of all messages: the prompts of the embedded task are whole as they are.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

REWARD = '''"""The reward of the embedded task: 1 for the right answer in the last line."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    text = solution_str.removesuffix("<eos>")
    return float(text.rsplit("\\n", 1)[-1] == f"#{ground_truth}")
'''

# What marks the processes of a run, which inherit it.
MARK = "APPORTION_VERL_RUN"


def tiny_model(folder: Path) -> Path:
    """The embedded policy (173,760 weights, 20 characters) as a folder that verl loads, with a chat template."""
    from apportion.tasks import policy_path

    target = folder / "model"
    target.mkdir(parents=True)
    for file in policy_path().iterdir():
        if file.suffix in (".json", ".safetensors") and file.name != "card.json":
            shutil.copy(file, target / file.name)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target


def parquet(folder: Path, train: int = 64, val: int = 8, operations: int = 5) -> tuple[Path, Path]:
    """Train and validation files of the embedded task in verl's format."""
    import pyarrow
    import pyarrow.parquet

    from apportion.tasks import ArithmeticTask, generate

    paths = []
    for name, split, count in (("train", "train", train), ("val", "test", val)):
        problems = generate(ArithmeticTask(operations=operations), split, count)
        rows = [
            {
                "data_source": "apportion/chain",
                "prompt": [{"role": "user", "content": problem.prompt}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": problem.answer},
                "extra_info": {"index": number, "split": split},
            }
            for number, problem in enumerate(problems)
        ]
        paths.append(folder / f"{name}.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), paths[-1])
    return paths[0], paths[1]


def reward_file(folder: Path) -> Path:
    """The file of a verl reward function called `compute_score`."""
    path = folder / "reward.py"
    path.write_text(REWARD)
    return path


def overrides(
    folder: Path,
    *,
    ranks: int = 2,
    steps: int = 3,
    prompts: int = 4,
    group: int = 4,
    mode: str = "sync",
    more: Sequence[str] = (),
) -> list[str]:
    """The command line of a GRPO run in a new folder: `ranks` FSDP2 ranks on gloo, a replica each.

    Args:
        prompts: of a step. group: responses a prompt. more: further overrides, which win.
    """  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    train, val = parquet(folder)
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return [
        "trainer.device=cpu",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={ranks}",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=100",
        "trainer.logger=[console,file]",
        "trainer.project_name=apportion",
        "trainer.experiment_name=run",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"trainer.rollout_data_dir={folder}/rollouts",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.v1.trainer_mode={mode}",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={train}",
        f"data.val_files={val}",
        f"data.train_batch_size={prompts}",
        "data.max_prompt_length=24",
        "data.max_response_length=96",
        "data.dataloader_num_workers=0",
        "data.seed=1",
        f"actor_rollout_ref.model.path={tiny_model(folder)}",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"+{actor}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
        f"{actor}.ppo_mini_batch_size={prompts}",
        f"{actor}.ppo_micro_batch_size_per_gpu=8",
        f"{actor}.optim.lr=1e-4",
        f"{rollout}.name=apportion_transformers",
        f"{rollout}.dtype=float32",
        f"{rollout}.n={group}",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        f"{rollout}.agent.num_workers=2",
        f"{rollout}.max_model_len=128",
        f"reward.custom_reward_function.path={reward_file(folder)}",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "+ray_kwargs.ray_init.address=local",
        "+ray_kwargs.ray_init.include_dashboard=False",
        f"+ray_kwargs.ray_init.num_gpus={ranks}",
        "ray_kwargs.ray_init.num_cpus=32",
        "+ray_kwargs.ray_init.object_store_memory=200000000",
        *more,
    ]


def run(
    overrides: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """`python -m verl.trainer.main_ppo` with these overrides; standard output and errors come together in `stdout`.

    Args:
        env: over the environment of this process. VERL_FILE_LOGGER_PATH names a file for the metrics, a line of JSON a
            step; without it they go with the run's working directory.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds. Whatever it started is ended first.
    """
    mark = uuid.uuid4().hex
    # The names of Ray's sockets have to be short.
    temporary = Path(tempfile.mkdtemp(prefix="av", dir="/tmp"))
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")
    }
    settings = {
        "VERL_PLATFORM": "cpu",
        # verl knows its FSDP engine by the devices that it was written for; it runs on this one as it is.
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "apportion.integrations.verl.replica",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "OMP_NUM_THREADS": "1",
        "HYDRA_FULL_ERROR": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **(env or {}),
        MARK: mark,
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, f"+ray_kwargs.ray_init._temp_dir={temporary}"]
    command.append(f"hydra.run.dir={temporary}/hydra")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=temporary,
        env=inherited | settings, start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=timeout)
    finally:
        end_marked(mark)
        process.wait()
        shutil.rmtree(temporary, ignore_errors=True)
    return subprocess.CompletedProcess(command, process.returncode, out)


def end_marked(mark: str) -> None:
    """Ends every process whose environment holds this mark, which are those of one run."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(50):
        left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if wanted in _environment(pid)]
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
