"""What happens around each optimiser step: its clock, the order of prompts in each epoch, and stopping on Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from apportion.train.clock import Clock
from apportion.train.resume import EpochSampler

if TYPE_CHECKING:
    from apportion.train.trainer import CreditTrainer


class StepCallback(TrainerCallback):
    """Keeps the trainer's clock and, on Ctrl-C, ends the run after the step in hand with a checkpoint.

    A second Ctrl-C stops at once; the last checkpoint is then where the run can go on from.
    """

    def __init__(self, trainer: CreditTrainer) -> None:
        self.trainer = trainer
        self.stopped = False
        self._asked = False
        self._handler: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stopped = self._asked = False
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._ask)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.release()

    def release(self) -> None:
        """Gives Ctrl-C back to whoever had it."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sampler = self.trainer.train_sampler
        if isinstance(sampler, EpochSampler):
            sampler.set_epoch(int(state.epoch or 0))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.clock = Clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for phase, seconds in self.trainer.clock.read().items():
            self.trainer.record_metric(f"seconds/{phase}", seconds)
        accelerator = self.trainer.accelerator
        # The signal may reach ranks in different steps, and all must leave after the same one.
        asked = torch.tensor([float(self._asked)], device=accelerator.device)
        if accelerator.reduce(asked, reduction="sum").item() > 0:
            self.stopped = control.should_save = control.should_training_stop = True

    def _ask(self, number: int, frame: Any) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        print("Stopping after this step, with a checkpoint. Press Ctrl-C again to stop at once.", file=sys.stderr)
