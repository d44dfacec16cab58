"""Run by `test_distributed.py` in one process and under torchrun: trains on recorded rollouts, saves the credit.

python two_ranks.py POLICY OUT          torchrun --nproc-per-node 2 two_ranks.py POLICY OUT
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import tiny
import torch

from apportion.train import CreditTrainer

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
STEPS, SIZE = 2, 4


class Recorded(CreditTrainer):
    """Rollouts come from a table instead of the rank's random stream; each rank takes its rows of the batch.

    In the first step only the first response has a step boundary, so that one rank has nothing to probe.
    """

    seen = 0

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        first = self.accelerator.process_index * len(prompt_ids)
        step, break_id = self.state.global_step, 10
        rows = []
        for i in range(first, first + len(prompt_ids)):
            body = [2 + (3 * i + 5 * step + t * (1 + i % 2)) % 8 for t in range(8 + (i * 7) % 13)]
            if step > 0:
                for at in range(2, len(body) - 2, 3 + i % 3):
                    body[at] = break_id
            elif i == 0:
                body[3] = break_id
            body[-1] = 5 + (i + i // 3) % 3
            rows.append([*body, 1])
        return rows, None

    def _credited(self, capture: Any, output: Any) -> Any:
        credited = super()._credited(capture, output)
        advantages = credited["advantages"]
        batch, credit = self.last_credit
        assert advantages.shape == output["completion_ids"].shape
        token = credit.token[batch.rollouts.offsets[batch.local.start] : batch.rollouts.offsets[batch.local.stop]]
        assert torch.equal(advantages[output["completion_mask"].bool()], token)
        own = self._metrics["train"]["probe/continuations"][-1]
        torch.save(
            {"token": credit.token, "ids": batch.rollouts.token_ids, "entropy": batch.rollouts.entropy,
             "row": credit.segments.row, "start": credit.segments.start, "raw": credit.segments.raw,
             "probes": own, "gap": self._metrics["train"].get("probe/logprob_gap", [None])[-1]},
            Path(self.args.output_dir) / f"credit-{self.state.global_step}-{self.accelerator.process_index}.pt",
        )  # fmt: skip
        return credited


def zero_2() -> dict[str, Any]:
    """DeepSpeed with gradients and optimiser state sharded, and no parameters."""
    # Else it compiles an operator of its own for gloo's reductions.
    sys.modules["deepspeed.comm.torch"] = import_module("deepspeed.comm.torch")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    return {
        "deepspeed": {
            **dict.fromkeys(auto, "auto"), "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    }  # fmt: skip


def main(policy: str, out: str, sharded: str = "") -> None:
    torch.set_num_threads(1)
    ranks = zero_2() if sharded else {"ddp_backend": "gloo"}
    Path(out).mkdir(parents=True, exist_ok=True)
    trainer = tiny.trainer(
        Path(policy), Path(out), cls=Recorded, per_device_train_batch_size=8 // WORLD, max_steps=STEPS,
        num_generations=SIZE, shuffle_dataset=False, run_folder=str(Path(out) / "run"), budget=12, shortlist=1.0,
        learning_rate=0.0, **(ranks if WORLD > 1 else {}),
    )  # fmt: skip
    assert trainer.accelerator.num_processes == WORLD, "the launcher started another number of processes"
    assert trainer.model_wrapped is trainer.model
    trainer.train()
    assert (trainer.model_wrapped is trainer.model) == (WORLD == 1)
    # gloo with DDP aborts or hangs now and then when ranks leave one after the other.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    print(f"rank {os.environ.get('RANK', '0')} done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
