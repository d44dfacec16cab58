"""A whole run from its configuration: train, evaluate, and leave a run folder that can be resumed.

Beside the records (see `apportion.records`) the folder holds `evaluations.jsonl`, `checkpoints/`, `model/` (the final
weights, or the adapter alone with LoRA) and, once the run is complete, `result.json`. Where the run can be predicted
(`run.predict`), every row of metrics.jsonl has `predicted/NAME` beside NAME, and result.json the table of both.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback, set_seed

from apportion.errors import InputError
from apportion.train.beside import Beside, predicted_for
from apportion.train.prepare import Run
from apportion.train.settings import save_config
from apportion.train.trainer import CreditTrainer
from apportion.train.watch import Complete, Progress, Watch


def train(run: Run, *, resume: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Trains, evaluating at the start and the end where the data has held-out problems.

    Args:
        resume: go on from the last checkpoint in the run folder; without one the run starts over.
        progress: called with each step's metrics.

    Returns:
        `tokens` generated, `steps`, and where there are held-out problems the accuracy at the `start` and `end` and
        the number of `samples` of each; where the run was predicted, the table `beside` (`apportion.report.beside`).

    Raises:
        KeyboardInterrupt: stopped by Ctrl-C; `resume` goes on from where the folder's last checkpoint is.
    """
    folder = Path(run.config.run.folder)
    save_config(run.config)
    checkpoint = last_checkpoint(folder) if resume else None
    prediction = predicted_for(run)
    # LoRA's fresh weights are drawn before the trainer sets its own seed.
    set_seed(run.config.run.seed)
    watch = Watch(run, progress)
    trainer = _trainer(run, watch)
    if checkpoint is None:
        watch.start(trainer.model)
    if prediction is not None:
        trainer.beside = Beside(prediction, trainer.model)
    # Before the trackers of trainer.report_to close.
    trainer.publisher.closing = lambda: watch.finish(trainer.state.global_step, trainer.model)
    trainer.publisher.evaluations = watch.evaluations
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    except Complete:
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    result = watch.finish(trainer.state.global_step, trainer.model)
    trainer.save_model(str(folder / "model"))
    run.tokenizer.save_pretrained(folder / "model")
    partial = folder / "result.json.part"
    partial.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(partial, folder / "result.json")
    return result


def last_checkpoint(folder: Path) -> Path | None:
    """The last whole checkpoint of a run folder, or None. The place in the generation window is written last."""
    whole = {path.parent for path in (folder / "checkpoints").glob("checkpoint-*/generation_window_*.safetensors")}
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _trainer(run: Run, watch: Watch) -> CreditTrainer:
    peft_config = _lora(run.config.model.lora)
    try:
        trainer = CreditTrainer(
            model=run.model, args=run.args, reward_funcs=run.data.reward, processing_class=run.tokenizer,
            train_dataset=Dataset.from_list(run.data.train), peft_config=peft_config, callbacks=[watch],
            step_verifier=run.data.steps,
        )  # fmt: skip
    except InputError:
        raise
    # TRL looks at some of its options only here, and for the packages that they need.
    except (ValueError, RuntimeError, ImportError) as error:
        raise InputError("trainer", " ".join(str(error).split()), "options that TRL can combine") from error
    trainer.remove_callback(PrinterCallback)
    return trainer


def _lora(rank: int) -> Any:
    if not rank:
        return None
    try:
        from peft import LoraConfig
    except ImportError:
        raise InputError("model.lora", rank, "the package peft", "pip install 'apportion[peft]'") from None
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
