"""What TRL leaves out of a checkpoint, so that a run that was stopped goes on bit for bit as if it had not been.

transformers saves weights, optimiser, scheduler, trainer state and the global random streams. Missing are the
place in the generation window with the batch generated for it, what the credit method remembers (its settings),
and the order of the prompts in later epochs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from trl.trainer.utils import RepeatSampler

from apportion.credit.registry import make_method

if TYPE_CHECKING:
    from apportion.train.trainer import CreditTrainer


class EpochSampler(RepeatSampler):
    """TRL's sampler, whose order depends on the seed and the epoch and not on how often it was iterated before.

    Epoch e of an unbroken run draws the e-th permutation of one generator; so does this, in any process that
    starts at epoch e.
    """

    epoch = 0

    @classmethod
    def like(cls, sampler: RepeatSampler) -> EpochSampler:
        """The same sampler, told the epoch by `set_epoch`."""
        return cls(
            sampler.data_source, sampler.mini_repeat_count, sampler.batch_size, sampler.repeat_count,
            sampler.shuffle, sampler.seed,
        )  # fmt: skip

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()


def save_window(trainer: CreditTrainer, checkpoint: Path) -> None:
    """Writes this rank's place in the generation window, and the generated batch where it is still in use."""
    window = trainer.args.steps_per_generation * trainer.num_iterations
    buffered = trainer._buffered_inputs if trainer._step % window else None
    tensors, other = {}, []
    for i, part in enumerate(buffered or []):
        for name, value in part.items():
            if isinstance(value, Tensor):
                # TRL hands out slices and shares the token count, and safetensors refuses shared memory.
                tensors[f"{i}/{name}"] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            elif value is not None:
                other.append(name)
    if other:
        raise RuntimeError(
            f"a checkpoint inside a generation window cannot keep {sorted(set(other))}: choose save_steps so that "
            f"save_steps × gradient_accumulation_steps is a multiple of {window}"
        )
    checkpoint.mkdir(parents=True, exist_ok=True)
    place = {"step": trainer._step, "parts": len(buffered or [])}
    method = {"name": trainer.args.method, "settings": dict(trainer.credit_method.settings)}
    metadata = {"window": json.dumps(place), "method": json.dumps(method)}
    if trainer.trees is not None and trainer.trees.replay is not None:
        waiting, about = trainer.trees.replay.state_dict()
        tensors |= {f"replay/{name}": tensor for name, tensor in waiting.items()}
        metadata |= about
    save_file(tensors, _file(trainer, checkpoint), metadata=metadata)


def load_window(trainer: CreditTrainer, checkpoint: Path) -> None:
    """Puts the trainer back where `save_window` found it; a checkpoint of plain TRL has nothing to read."""
    path = _file(trainer, checkpoint)
    if not path.is_file():
        return
    with safe_open(path, framework="pt", device=str(trainer.accelerator.device)) as file:
        place = json.loads(file.metadata()["window"])
        method = json.loads(file.metadata()["method"])
        parts: list[dict[str, Tensor]] = [{} for _ in range(place["parts"])]
        waiting: dict[str, Tensor] = {}
        for key in sorted(file.keys()):
            part, _, name = key.partition("/")
            (waiting if part == "replay" else parts[int(part)])[name] = file.get_tensor(key)
        if trainer.trees is not None and trainer.trees.replay is not None:
            trainer.trees.replay.load_state_dict({n: t.cpu() for n, t in waiting.items()}, file.metadata())
    trainer.credit_method = make_method(method["name"], method["settings"])
    trainer._step = place["step"]
    trainer._buffered_inputs = parts or None


def _file(trainer: CreditTrainer, checkpoint: Path) -> Path:
    return checkpoint / f"generation_window_{trainer.accelerator.process_index}.safetensors"
