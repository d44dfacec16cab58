"""verl's trainers with per-token credit: its own step, in which the method measures before the actor is updated.

A step of verl samples, balances, computes log-probabilities and entropies, then advantages. Here the rollout replicas
stay awake until the method's probes are answered; its credit then takes the place of the advantages that verl wrote.
Everything else is verl's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from omegaconf import OmegaConf, open_dict
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer

from apportion.credit.registry import make_method
from apportion.errors import InputError
from apportion.integrations.verl.measuring import Measurer
from apportion.integrations.verl.reading import readers_in
from apportion.integrations.verl.rows import Reader, Rows, write_advantages
from apportion.integrations.verl.settings import CreditSettings, check_config
from apportion.integrations.verl.versions import check_signatures
from apportion.measure.batch import READ_IN_TEXT
from apportion.records import RunFolder
from apportion.train.metrics import step_metrics
from apportion.train.recording import record_batch

# What a checkpoint of verl's holds of the method: its settings, which some methods change as they go.
STATE = "apportion.json"


class CreditSteps(PPOTrainer):
    """What each of verl's trainers gets: mixed in before it.

    Class variables:
        mode: the trainer's own name, on which verl branches. colocated: whether replicas share the trainer's GPUs, and
            sleep while it computes.

    Raises:
        InputError: a verl that this plugin does not know, a block `apportion` with a fault in it, an option of verl's
            that the method cannot be combined with. All before anything starts.
    """

    mode: ClassVar[str]
    colocated: ClassVar[bool] = True

    def __init__(self, config: Any) -> None:
        check_signatures()
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.mode
        self.credit_settings = CreditSettings.of(OmegaConf.to_container(config.get("apportion") or {}, resolve=True))
        self.credit_method = self.credit_settings.make_method()
        check_config(config, self.credit_settings, self.credit_method)
        self._probes = "continuations" in self.credit_method.needs
        self._awake = self._probes and self.colocated and self.credit_settings.probe.replicas == "awake"
        super().__init__(config)
        if config.trainer.device == "cpu":
            # Steps are short there, and no setting of verl's own buffers reaches the 2 s between its polls.
            self.replay_buffer.poll_interval = 0.05

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        readers_in(self.role_worker_mapping, self.credit_method)

    def fit(self, agent_loop_manager: Any) -> None:
        folder = self.credit_settings.run_folder
        self.records = None if folder is None else RunFolder(folder)
        if self.records is not None:
            if self.records.steps() and not self.global_steps:
                raise InputError(
                    "apportion.run_folder", repr(folder), "a folder without another run's records, or a run to resume",
                    "name another folder",
                )  # fmt: skip
            self.records.path.mkdir(parents=True, exist_ok=True)
            OmegaConf.save(self.config, self.records.path / "verl.yaml")
        self.measurer = Measurer(self)
        self.reader = Reader(
            self.measurer.decode, self.measurer.eos, self.config.data.max_response_length,
            bool(self.config.algorithm.get("norm_adv_by_std_in_grpo", True)),
            text=self.records is not None or bool(READ_IN_TEXT & self.credit_method.needs),
        )  # fmt: skip
        try:
            super().fit(agent_loop_manager)
        finally:
            self.measurer.close()

    def on_sample_end(self) -> None:
        if not self._awake:
            super().on_sample_end()

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_advantage(batch, metrics)
        rows = self.reader.read(batch, self.local_trigger_step)
        with marked_timer("probe", self.timing_raw, color="olive"):
            measured, cost = self._measure(rows, metrics)
            measured = replace(measured, gap=self.measurer.gap(batch, metrics))
        credit = self.credit_method.assign(rows.batch.rollouts, measured.evidence, rows.batch.base)
        # What the method remembers is for the next batch.
        self.credit_method = self.credit_method.after(rows.batch.rollouts)
        write_advantages(batch, rows.keys, rows.batch.rollouts, credit.token)
        actor = len(rows.batch.rollouts.token_ids)
        metrics.update(step_metrics(rows.batch.rollouts, credit, measured, actor, cost))
        # Where verl updates several times a step, the records hold the first of its batches.
        due = self.global_steps % self.credit_settings.record_every == 0 and self.local_trigger_step == 0
        if self.records is not None and due:
            record_batch(self.records, self.global_steps, rows.batch, measured, credit, self.measurer.decode)
        return batch

    def _measure(self, rows: Rows, metrics: dict[str, Any]) -> Any:
        """What the method asks for, with replicas that are awake as long as they are needed."""
        if not self._probes:
            return self.measurer.measure(rows, self.global_steps, metrics)
        if self.colocated and not self._awake:
            # The version that they had: nothing has been updated since.
            self.checkpoint_manager.update_weights(self.global_steps - 1)
            self._woken()
        try:
            return self.measurer.measure(rows, self.global_steps, metrics)
        finally:
            if self.colocated:
                super().on_sample_end()

    def _woken(self) -> None:
        """Called once replicas have been woken for probes."""

    def serving(self) -> Any:
        """verl's manager of the rollout replicas that answer probes."""
        return self.llm_server_manager

    def _compute_metrics(self, batch: Any, metrics: Any, timing_raw: Any, global_steps: int, epoch: int) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if self.records is not None:
            numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
            self.records.log({"step": global_steps, "loss": numbers.get("actor/pg_loss", float("nan")), **numbers})

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        kept = {"method": self.credit_method.name, "settings": dict(self.credit_method.settings)}
        self._state_file(self.global_steps).write_text(json.dumps(kept))

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        self._resumed = self.global_steps
        file = self._state_file(self.global_steps)
        if self.global_steps and file.exists():
            kept = json.loads(file.read_text())
            if kept["method"] == self.credit_method.name:
                self.credit_method = make_method(kept["method"], kept["settings"])

    def _state_file(self, step: int) -> Path:
        trainer = self.config.trainer
        if trainer.resume_mode == "resume_path" and step == self._resumed:
            return Path(trainer.resume_from_path) / STATE
        return Path(trainer.default_local_dir) / f"global_step_{step}" / STATE


@register_trainer("apportion_sync")
class CreditSync(CreditSteps, PPOTrainerSync):
    """Rollout and training take turns on the same GPUs; every response is of the weights that are trained."""

    mode = "sync"


@register_trainer("apportion_colocate_async")
class CreditColocateAsync(CreditSteps, PPOTrainerColocateAsync):
    """As above, and responses that are not done when a step has enough go on in the next one, with newer weights.

    While the replicas stay awake for probes, those responses go on too.
    """

    mode = "colocate_async"

    def _woken(self) -> None:
        self.checkpoint_manager.resume_generation_replicas()


@register_trainer("apportion_separate_async")
class CreditSeparateAsync(CreditSteps, PPOTrainerSeparateAsync):
    """Rollout replicas of their own, which never sleep and are given new weights now and then.

    Probes are made by the weights that the replicas have when they come; the versions of both are recorded
    (`apportion.probe.max_staleness` leaves out probes too far from their response).
    """

    mode = "separate_async"
    colocated = False

    def serving(self) -> Any:
        return self.standalone_server_manager


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1) or (
        hasattr(value, "item") and getattr(value, "size", 0) == 1
    )  # fmt: skip
