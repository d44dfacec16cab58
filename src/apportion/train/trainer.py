"""TRL's GRPO trainer with per-token credit: TRL's methods are wrapped and never copied.

Shapes: _B responses of this rank, _T padded tokens, _F reward functions, _R responses of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Sampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from apportion.credit.record import Credit
from apportion.engines.base import Cost
from apportion.engines.rng import frozen_rng
from apportion.errors import InputError
from apportion.measure.batch import Batch
from apportion.measure.readings import Measurement
from apportion.records import RunFolder
from apportion.train.clock import Clock
from apportion.train.compatibility import check_trainer, measures
from apportion.train.config import CreditConfig
from apportion.train.host import Capture, gather_batch, random_state
from apportion.train.measuring import Measurer
from apportion.train.metrics import step_metrics
from apportion.train.probing import sampling_of
from apportion.train.publish import Publisher
from apportion.train.recording import record_batch
from apportion.train.reference import frozen_copy
from apportion.train.resume import EpochSampler, load_window, save_window
from apportion.train.steps import StepCallback
from apportion.train.streaming import GroupStream
from apportion.train.trees import Trees
from apportion.verify.steps import StepVerifier


class CreditTrainer(GRPOTrainer):
    """`GRPOTrainer` whose advantages are spread over tokens by `args.method`. Takes what `GRPOTrainer` takes, and
    `step_verifier` for methods that read verdicts on steps (see `apportion.verify.steps`).

    Each generation batch is frozen with TRL's own rewards, μ, σ and advantages; the method plans what to measure,
    the probes are generated with the trainer's own weights and graded with its own reward functions, and
    `advantages` becomes (B, T). Nothing of that happens in evaluation, and neither rollouts nor random streams,
    TRL's metrics or its completion logs see the probes: α = 0 and method="grpo" train as `GRPOTrainer` does, bit
    for bit.

    With a `run_folder` and `report_to`, the page of the run goes to W&B, trackio and TensorBoard when training ends.

    Ctrl-C ends the run after the step in hand, with a checkpoint; `train(resume_from_checkpoint=True)` goes on
    from it as if it had not been stopped.

    Works in one process and under DDP (`torchrun`, and assert `trainer.accelerator.num_processes`: `accelerate launch
    --cpu` silently starts one). gloo may hang when ranks leave one after the other: end such a script with
    `trainer.accelerator.wait_for_everyone()` and `trainer.accelerator.end_training()`.

    Raises:
        InputError: `args` is no `CreditConfig`, or what was handed in cannot be combined with the method.
    """

    _tag_names: ClassVar[list[str]] = [*GRPOTrainer._tag_names, "apportion"]

    def __init__(self, *args: Any, step_verifier: StepVerifier | None = None, **kwargs: Any) -> None:
        config = kwargs.get("args", args[2] if len(args) > 2 else None)
        if not isinstance(config, CreditConfig):
            raise InputError("args", type(config).__name__, "a CreditConfig", "CreditConfig(..., method='probepo')")
        self.credit_method = config.make_method()
        self.step_verifier = step_verifier
        self.reference: nn.Module | None = None
        # Forwards through TRL's own methods that TRL would not have made, and all that was spent until the last step.
        self.passes, self._spent = Cost(), Cost()
        self.clock = Clock()
        self.beside: Callable[[], Mapping[str, float]] = dict
        self.train_sampler: Sampler | None = None
        self.last_credit: tuple[Batch, Credit] | None = None
        self._capture: Capture | None = None
        self._prompts_of_step = (-1, 0)
        super().__init__(*args, **kwargs)
        check_trainer(self, self.credit_method)
        if "ref_logprob" in self.credit_method.needs and self.args.beta == 0:
            self.reference = frozen_copy(self.accelerator.unwrap_model(self.model))
        self._measurer = Measurer(self) if measures(self.credit_method) else None
        self.trees = Trees(self, sampling_of(self)) if "tree" in self.credit_method.needs else None
        self.stream = None
        if self.args.stream and self._measurer is not None:
            self.stream = GroupStream(self, self._measurer.sampler)
        self._steps = StepCallback(self)
        self.add_callback(self._steps)
        self.publisher = Publisher(self, self._steps)
        # Before the trackers of `report_to`, which close when training ends.
        self.callback_handler.callbacks.insert(0, self.publisher)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `GRPOTrainer.train`.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; after the first one the step in hand has been finished and saved.
        """
        try:
            result = super().train(*args, **kwargs)
        finally:
            self._steps.release()
        if self._steps.stopped:
            raise KeyboardInterrupt(f"stopped after step {self.state.global_step}; its checkpoint can be resumed")
        return result

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included, as boundaries are found in it and records keep it."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            # What `decode` calls after looking at every id: nearly all of its time on short pieces.
            return backend.decode(list(ids), skip_special_tokens=False)
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def record_metric(self, name: str, value: float) -> None:
        """Adds to what TRL averages and reports at the next training log."""
        self._metrics["train"][name].append(value)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self._capture = capture = Capture(rows=list(inputs))
        try:
            with self.clock.phase("generate"):
                output = super()._generate_and_score_completions(inputs)
        finally:
            self._capture = None
        with self.clock.phase("credit"), frozen_rng():
            return self._credited(capture, output)

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, *args: Any, **kwargs: Any
    ) -> Any:
        capture, step = self._capture, self.state.global_step + 1
        if capture is not None and self.stream is not None and self.stream.fits(prompt_ids):
            # What is graded meanwhile is not TRL's call, which comes later.
            self._capture = None
            try:
                capture.streamed = self.stream.sample(capture.rows, prompt_ids, step, self._prompts_seen(step))
            finally:
                self._capture = capture
            return [list(rollout.token_ids) for rollout in capture.streamed.rollouts], None
        if capture is not None and self.trees is not None:
            with frozen_rng():
                leaves, filler, generated = self.trees.sample(prompt_ids, step, self._prompts_seen(step))
            capture.leaves, capture.filler, capture.generated = leaves, filler, generated
            return [list(leaf.token_ids) for leaf in leaves], None
        return super()._generate_single_turn(
            prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs
        )  # fmt: skip

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        if self._capture is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if (streamed := self._capture.streamed) is not None:
            for logs in streamed.logs:
                logs.replay(self)
            rewards_RF = streamed.rewards
        else:
            with self.clock.phase("grade"):
                rewards_RF = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._capture.filler:
            rewards_RF[torch.tensor(self._capture.filler, device=rewards_RF.device)] = torch.nan
        self._capture.token_ids, self._capture.rewards = completion_ids_list, rewards_RF
        return rewards_RF

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._capture is None:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        wanted = kwargs.pop("compute_entropy", False)
        # The policy's head computes entropies anyway; the reference model's does not.
        kwargs["compute_entropy"] = wanted or model is self.model
        before = random_state()
        logprob, entropy, aux_loss = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        drew = any(not torch.equal(a, b) for a, b in zip(before, random_state(), strict=True))
        self._capture.passes.append((logprob, entropy, drew))
        return logprob, entropy if wanted else None, aux_loss

    def _prompts_seen(self, step: int) -> int:
        """How many prompts of this optimiser step earlier generation batches held."""
        return self._prompts_of_step[1] if self._prompts_of_step[0] == step else 0

    def _credited(self, capture: Capture, output: dict[str, Any]) -> dict[str, Any]:
        """TRL's batch with the method's advantages: (B,) where every token of a response gets the same, else (B, T)
        float32 with 0 on padding. Where edges of trees are trained by themselves, a row an edge.
        """
        method, step = self.credit_method, self.state.global_step + 1
        seen = self._prompts_seen(step)
        batch = gather_batch(self, capture, output, occurrence=seen)
        rollouts, base = batch.rollouts, batch.base
        self._prompts_of_step = (step, seen + rollouts.groups)
        measured = Measurement() if self._measurer is None else self._measurer.measure(batch, step, capture.streamed)
        credit = method.assign(rollouts, measured.evidence, base)
        self.last_credit = (batch, credit)
        # What the method remembers is for the next batch; every rank has seen the same one.
        self.credit_method = method.after(rollouts)
        spent = self.passes + (Cost() if self._measurer is None else self._measurer.cost)
        cost = sum(gather_object([spent - self._spent]), Cost())
        self._spent = spent
        actor = capture.generated or len(rollouts.token_ids)
        for name, value in step_metrics(rollouts, credit, measured, actor, cost).items():
            self.record_metric(name, value)
        # Where TRL generates several times for one step, the records hold the first batch.
        if seen == 0 and self._records and step % self.args.record_every == 0:
            record_batch(RunFolder(self.args.run_folder), step, batch, measured, credit, self.decode)
        if self.trees is not None and self.trees.replay is not None:
            return self.trees.edges(rollouts, credit, step)
        device = output["advantages"].device
        if not method.per_token:
            return {**output, "advantages": credit.base[batch.local].to(device)}
        token_BT = rollouts.to_padded(credit.token)[batch.local]
        token_BT = functional.pad(token_BT, (0, output["completion_ids"].size(1) - token_BT.size(1))).to(device)
        return {**output, "advantages": token_BT}

    @property
    def _records(self) -> bool:
        return self.args.run_folder is not None and self.accelerator.is_main_process

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            # TRL averages over generation batches, of which a step may have several: what it spent is their sum.
            found = self._metrics["train"]
            steps = max(1, len(found.get("seconds/update", ())))
            for name in list(found):
                if name.startswith(("tokens/", "probe/tokens", "probe/continuations", "measure/")):
                    found[name] = [sum(found[name]) / steps]
            logs.update(self.beside())
        super().log(logs, start_time)
        # Evaluations and the summary at the end come with the same step as a training log.
        if self._records and "loss" in logs:
            RunFolder(self.args.run_folder).log({"step": self.state.global_step, **logs})

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        sampler = super()._get_train_sampler(dataset)
        self.train_sampler = EpochSampler.like(sampler) if type(sampler) is RepeatSampler else sampler
        return self.train_sampler

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        save_window(self, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_window(self, Path(checkpoint))
