"""What experiment trackers get beside the scalars that transformers sends them: held-out accuracy and the page.

Trackers are those that `report_to` names, and callbacks of theirs that were handed in; nothing goes anywhere else.
Scalars keep TRL's names under `train/`; held-out accuracy is `eval/accuracy`.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from apportion.errors import InputError
from apportion.records import json_lines
from apportion.report.page import write_page
from apportion.train.steps import StepCallback

if TYPE_CHECKING:
    from apportion.train.trainer import CreditTrainer

PAGE_FILE = "page.html"

_TYPE = "credit-page"
# W&B's workspace loads a shown page whole; beyond this it is in the artifact only.
_SHOWN_BYTES = 10_000_000
# No text of the model or of the run goes in: TensorBoard reads it as Markdown.
_POINTER = f"The credit page is `{PAGE_FILE}`, in the folder of this event file. Open it in a browser."
_NAMES = {kind: name for name, kind in INTEGRATION_TO_CALLBACK.items()}
_GUARDED = [name for name in dir(TrainerCallback) if name.startswith("on_") and name != "on_train_begin"]


class Publisher(TrainerCallback):
    """Hands the page to W&B, trackio and TensorBoard when training ends, also where Ctrl-C ended it; in the first
    process alone.

    A tracker that cannot start ends the run before its first step. What one raises later is warned of once, and the
    tracker then left alone: training goes on, and metrics.jsonl has all that it would have got.

    It has to come before the trackers' own callbacks, which close them when training ends.

    Attributes:
        evaluations: JSONL file of `step` and `accuracy` that is told to every tracker; None: there is none.
        closing: called when training ends by itself, while the trackers are still open, in every process.
    """

    def __init__(self, trainer: CreditTrainer, steps: StepCallback) -> None:
        self.trainer, self.steps = trainer, steps
        self.evaluations: Path | None = None
        self.closing: Callable[[], object] = lambda: None
        self._told = 0
        self._known: set[str] = set()
        self._failed: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A resumed run's earlier evaluations were told by the run that made them.
        self._told = sum(row["step"] <= state.global_step for row in self._rows()) if state.global_step else 0
        for name, tracker in self._trackers().items():
            if name not in self._known:
                self._known.add(name)
                tracker.on_train_begin = partial(_started, name, tracker.on_train_begin)
                for event in _GUARDED:
                    setattr(tracker, event, partial(self._guarded, name, getattr(tracker, event)))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell(args, state, control, kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The last checkpoint is written; Ctrl-C may end what comes now at once.
        self.steps.release()
        if not self.steps.stopped:
            self.closing()
        self._tell(args, state, control, kwargs)
        if state.is_world_process_zero and args.run_folder is not None:
            self._publish(Path(args.run_folder), state.global_step)

    def _tell(self, args: Any, state: Any, control: Any, kwargs: Mapping[str, Any]) -> None:
        """Sends evaluations that are new, through the trackers' own callbacks, which know their names and steps."""
        rows = self._rows()
        for row in rows[self._told :]:
            for tracker in self._trackers().values():
                # transformers turns `eval_` into `eval/`.
                tracker.on_log(args, state, control, logs={"eval_accuracy": row["accuracy"]}, **kwargs)
        self._told = len(rows)

    def _publish(self, folder: Path, step: int) -> None:
        takers = [(name, each) for name, each in self._trackers().items() if name in _SENDERS]
        if not takers:
            return
        try:
            page = write_page(folder, folder / PAGE_FILE)
        # A run that recorded nothing has no page, and whatever else fails must not cost the run its end.
        except Exception as error:
            _warn(f"no credit page was written: {error}")
            return
        for name, tracker in takers:
            self._guarded(name, _SENDERS[name], tracker, page, step)

    def _trackers(self) -> dict[str, Any]:
        """By the name that `report_to` has for them."""
        found = {}
        for each in self.trainer.callback_handler.callbacks:
            if name := next((_NAMES[kind] for kind in type(each).__mro__ if kind in _NAMES), None):
                found[name] = each
        return found

    def _guarded(self, name: str, call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        if name in self._failed:
            return
        try:
            call(*args, **kwargs)
        # Each tracker fails in ways of its own: no network, an older release, a full disk.
        except Exception as error:
            self._failed.add(name)
            _warn(f"{name} is left alone from here on, training goes on: {type(error).__name__}: {error}")

    def _rows(self) -> list[dict[str, Any]]:
        return [] if self.evaluations is None else json_lines(self.evaluations)


def _started(name: str, start: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    try:
        start(*args, **kwargs)
    except Exception as error:
        raise InputError(
            "report_to", f"{name}, which did not start ({' '.join(str(error).split())})", "trackers that start",
            "follow its message, or leave it out",
        ) from error  # fmt: skip


def _to_wandb(tracker: Any, page: Path, step: int) -> None:
    wandb = import_module("wandb")
    wandb.run.log_artifact(str(page), name=f"{_TYPE}-{wandb.run.id}", type=_TYPE)
    if page.stat().st_size <= _SHOWN_BYTES:
        # Injected style would come from W&B's server, which the page's own policy forbids.
        shown = wandb.Html(str(page), inject=False)
        wandb.log({"credit/page": shown, "train/global_step": step})


def _to_trackio(tracker: Any, page: Path, step: int) -> None:
    run = import_module("trackio").context_vars.current_run.get()
    run.log_artifact(str(page), name=f"{_TYPE}-{run.id}", type=_TYPE)


def _to_tensorboard(tracker: Any, page: Path, step: int) -> None:
    writer = tracker.tb_writer
    # torch's writer has `log_dir`, tensorboardX's `logdir`.
    shutil.copyfile(page, Path(getattr(writer, "log_dir", None) or writer.logdir) / PAGE_FILE)
    writer.add_text("credit/page", _POINTER, step)
    writer.flush()


_SENDERS: dict[str, Callable[[Any, Path, int], None]] = {
    "wandb": _to_wandb, "trackio": _to_trackio, "tensorboard": _to_tensorboard,
}  # fmt: skip


def _warn(message: str) -> None:
    warnings.warn(" ".join(message.split()), stacklevel=2)
