"""Trackers of `report_to`: every scalar once, the page while they are open, and no failure of theirs that costs a run.

W&B, trackio and TensorBoard are stood in for by modules of the same names that note what they are given; the real
TensorBoard is asked where it is installed. Planted faults seen caught: the publisher after the trackers' own callbacks,
evaluations told again after a resume, the final one told after the trackers closed, a tracker's error let through,
warned of twice or asked again after it, a page without `run_folder` or without a tracker, W&B's style injected, a page
of every process.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tiny
from transformers import TrainerCallback

from apportion.errors import InputError
from apportion.records import RunFolder
from apportion.train import CreditTrainer
from apportion.train import publish as publishing
from apportion.train import run as running
from apportion.train.prepare import prepare
from apportion.train.settings import load_config, resume_config

ALL = ["wandb", "trackio", "tensorboard"]


class Tracker:
    """What a stand-in was given, in order. `broken`: names of calls that raise."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[str, Any]] = []
        self.broken: set[str] = set()

    def note(self, call: str, value: Any = None) -> None:
        self.calls.append((call, value))
        if call in self.broken:
            raise ConnectionError(f"{self.name}: no\nnetwork for {call}")

    def of(self, call: str) -> list[Any]:
        return [value for name, value in self.calls if name == call]

    def scalars(self) -> dict[str, list[tuple[int, float]]]:
        """Name → (step, value) in the order in which they came."""
        found: dict[str, list[tuple[int, float]]] = {}
        for step, row in self.of("log"):
            for name, value in row.items():
                if isinstance(value, int | float) and name != "train/global_step":
                    found.setdefault(name, []).append((step, value))
        return found


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class _Config(dict[str, Any]):
    def update(self, values: Any, allow_val_change: bool = False) -> None:
        super().update(values)


def _run(tracker: Tracker) -> SimpleNamespace:
    def log_artifact(path: str, name: str, type: str) -> None:
        tracker.note("artifact", (name, type, Path(path).name, Path(path).read_bytes()))

    return SimpleNamespace(
        id="r1", summary={}, _space_id=None, url=None, _label=lambda **_: None, log_artifact=log_artifact
    )


def _wandb(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    tracker = Tracker("wandb")

    def init(**_: Any) -> None:
        tracker.note("init")
        wandb.run = _run(tracker)

    def html(path: str, inject: bool = True) -> SimpleNamespace:
        return SimpleNamespace(text=Path(path).read_text(), inject=inject)

    wandb: Any = _module(
        monkeypatch, "wandb", run=None, config=_Config(), init=init, Html=html, define_metric=lambda *_, **__: None,
        log=lambda row: tracker.note("log", (row.get("train/global_step"), row)),
    )  # fmt: skip
    for name in ("wandb.sdk", "wandb.sdk.lib"):
        _module(monkeypatch, name)
    _module(monkeypatch, "wandb.sdk.lib.config_util", ConfigError=KeyError)
    _imported(monkeypatch, "wandb", wandb)
    return tracker


def _trackio(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    tracker, current = Tracker("trackio"), SimpleNamespace(run=None)

    def init(**_: Any) -> None:
        tracker.note("init")
        current.run = _run(tracker)

    def finish() -> None:
        tracker.note("finish")
        current.run = None

    context = SimpleNamespace(
        current_space_id=SimpleNamespace(get=lambda: None), current_run=SimpleNamespace(get=lambda: current.run)
    )
    trackio = _module(
        monkeypatch, "trackio", config=_Config(), init=init, finish=finish, context_vars=context,
        log=lambda row, step=None: tracker.note("log", (row.get("train/global_step"), row)),
    )  # fmt: skip
    _imported(monkeypatch, "trackio", trackio)
    return tracker


def _imported(monkeypatch: pytest.MonkeyPatch, name: str, module: ModuleType) -> None:
    """TRL looks for trackers when it is imported, for its profiling and its model cards."""
    for place in ("extras.profiling", "trainer.base_trainer", "trainer.grpo_trainer"):
        monkeypatch.setattr(sys.modules[f"trl.{place}"], name, module, raising=False)


def _tensorboard(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    tracker = Tracker("tensorboard")

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            self.log_dir = log_dir
            Path(log_dir).mkdir(parents=True)
            tracker.note("init", Path(log_dir))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            tracker.note("log", (step, {name: value}))

        def add_text(self, name: str, text: str, step: int | None = None) -> None:
            tracker.note("text", (name, text, step))

        def flush(self) -> None: ...

        def close(self) -> None:
            tracker.note("finish")

    _module(monkeypatch, "tensorboard")
    _module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    return tracker


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tracker]:
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    made = (_wandb(monkeypatch), _trackio(monkeypatch), _tensorboard(monkeypatch))
    return {tracker.name: tracker for tracker in made}


def trained(policy: Path, folder: Path, **changes: Any) -> CreditTrainer:
    trainer = tiny.trainer(policy, folder, **{"run_folder": str(folder / "run"), "report_to": ALL, **changes})
    trainer.beside = lambda: {"predicted/seconds/generate": 0.25}
    trainer.train()
    return trainer


def test_every_scalar_comes_once_and_the_page_while_the_tracker_is_open(
    policy: Path, tmp_path: Path, trackers: dict[str, Tracker]
) -> None:
    trained(policy, tmp_path)
    run = tmp_path / "run"
    logged = RunFolder(run).metrics()
    assert [row.pop("step") for row in logged] == [1, 2]
    numbers = {f"train/{name}" for row in logged for name, value in row.items() if value is not None}
    for wanted in ("credit/acr", "credit/error/conserved", "probe/tokens", "measure/forwards", "seconds/probe",
                   "predicted/seconds/generate", "reward", "loss"):  # fmt: skip
        assert f"train/{wanted}" in numbers
    for tracker in trackers.values():
        scalars = tracker.scalars()
        for name in numbers:
            expected = [
                (step, row[name.removeprefix("train/")]) for step, row in enumerate(logged, 1)
                if row.get(name.removeprefix("train/")) is not None
            ]  # fmt: skip
            assert [each for each in scalars[name] if each[0] <= 2][: len(expected)] == expected
            # `epoch` comes once more with transformers' summary of the whole run.
            assert len(scalars[name]) == len(expected) + (name == "train/epoch")
        calls = [name for name, _ in tracker.calls]
        assert calls[0] == "init" and "finish" not in calls[:-1]
    page = (run / "page.html").read_bytes()
    for name in ("wandb", "trackio"):
        assert trackers[name].of("artifact") == [("credit-page-r1", "credit-page", "page.html", page)]
    (step, row), = (each for each in trackers["wandb"].of("log") if "credit/page" in each[1])  # fmt: skip
    assert step == 2 and row["credit/page"].text.encode() == page and not row["credit/page"].inject
    folder = trackers["tensorboard"].of("init")[0]
    assert (folder / "page.html").read_bytes() == page
    (told,) = (each for each in trackers["tensorboard"].of("text") if each[0] == "credit/page")
    # Of fixed words: nothing that the model or the run has written.
    assert told[2] == 2 and set(re.findall(r"\S+\.\S+", told[1])) == {"`page.html`,"} and str(tmp_path) not in told[1]


@pytest.mark.parametrize("changes", [{"report_to": "none"}, {"run_folder": None}])
def test_nothing_leaves_unless_it_was_asked_for(
    policy: Path, tmp_path: Path, trackers: dict[str, Tracker], changes: dict[str, Any]
) -> None:
    trained(policy, tmp_path, **changes)
    assert not list(tmp_path.rglob("page.html"))
    for tracker in trackers.values():
        assert not tracker.of("artifact")
        assert bool(tracker.calls) == ("run_folder" in changes)


def test_a_large_page_is_not_shown(
    policy: Path, tmp_path: Path, trackers: dict[str, Tracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_SHOWN_BYTES", 1_000)
    trained(policy, tmp_path, report_to="wandb")
    assert trackers["wandb"].of("artifact")
    assert not any("credit/page" in row for _, row in trackers["wandb"].of("log"))


def test_a_tracker_that_fails_is_warned_of_once_and_changes_nothing(
    policy: Path, tmp_path: Path, trackers: dict[str, Tracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    # TRL's own profiling asks trackio without a guard of ours.
    monkeypatch.setattr("trl.extras.profiling.is_trackio_available", lambda: False)
    quiet = trained(policy, tmp_path / "a", report_to="none")
    trackers["trackio"].broken = {"log"}
    trackers["wandb"].broken = {"artifact"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loud = trained(policy, tmp_path / "b")
    told = [str(each.message) for each in caught if "left alone" in str(each.message)]
    assert sorted(told) == [
        "trackio is left alone from here on, training goes on: ConnectionError: trackio: no network for log",
        "wandb is left alone from here on, training goes on: ConnectionError: wandb: no network for artifact",
    ]
    assert len(trackers["trackio"].of("log")) == 1 and not trackers["trackio"].of("artifact")
    assert (trackers["tensorboard"].of("init")[0] / "page.html").exists()
    assert tiny.equal(tiny.parameters(quiet.model), tiny.parameters(loud.model))


def test_a_release_without_artifacts(
    policy: Path, tmp_path: Path, trackers: dict[str, Tracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "_run", lambda tracker: SimpleNamespace(id="r1"))
    with pytest.warns(UserWarning, match="trackio is left alone .*AttributeError.*log_artifact"):
        trained(policy, tmp_path, report_to="trackio")


def test_a_tracker_that_cannot_start_ends_the_run_before_its_first_step(
    policy: Path, tmp_path: Path, trackers: dict[str, Tracker]
) -> None:
    trackers["trackio"].broken = {"init"}
    with pytest.raises(InputError, match=r"report_to: got trackio, which did not start \(trackio: no network for init"):
        trained(policy, tmp_path)
    assert not RunFolder(tmp_path / "run").path.exists()


def test_without_records_there_is_no_page(policy: Path, tmp_path: Path, trackers: dict[str, Tracker]) -> None:
    with pytest.warns(UserWarning, match="no credit page was written") as caught:
        trained(policy, tmp_path, record_every=9)
    assert sum("credit page" in str(each.message) for each in caught) == 1
    assert not trackers["wandb"].of("artifact") and not list(tmp_path.rglob("page.html"))


class _PressCtrlC(TrainerCallback):
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_publishes_after_its_checkpoint(policy: Path, tmp_path: Path, trackers: dict[str, Tracker]) -> None:
    closed = []
    trainer = tiny.trainer(
        policy, tmp_path, run_folder=str(tmp_path / "run"), report_to=ALL, max_steps=5, callbacks=[_PressCtrlC()]
    )
    trainer.publisher.closing = lambda: closed.append(True)
    write = publishing.write_page

    def written(run: Path, out: Path) -> Path:
        assert (tmp_path / "checkpoint-2").is_dir()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return write(run, out)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt, match="after step 2"):
        patch.setattr(publishing, "write_page", written)
        trainer.train()
    assert [each[:2] for each in trackers["wandb"].of("artifact")] == [("credit-page-r1", "credit-page")]
    assert not closed


def test_only_the_first_process_publishes(policy: Path, tmp_path: Path, trackers: dict[str, Tracker]) -> None:
    trainer = trained(policy, tmp_path, report_to="none")
    trainer.add_callback(publishing.INTEGRATION_TO_CALLBACK["tensorboard"])
    for first in (False, True):
        state = SimpleNamespace(is_world_process_zero=first, global_step=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.publisher.on_train_end(trainer.args, state, trainer.control)
        assert (tmp_path / "run" / "page.html").exists() == first


SMALL = {
    "run.steps": 3, "run.checkpoint_every": 2, "run.threads": 1, "run.evaluate_samples": 8, "run.evaluate_every": 2,
    "data.operations": 2, "data.count": 32, "method.budget": 8, "method.samples": 4, "method.min_gap": 2,
    "method.window": 2, "trainer.per_device_train_batch_size": 8, "trainer.gradient_accumulation_steps": 1,
    "trainer.num_generations": 4, "trainer.report_to": ALL,
}  # fmt: skip


def test_held_out_accuracy_of_a_run_and_of_its_resumption(tmp_path: Path, trackers: dict[str, Tracker]) -> None:
    folder = tmp_path / "run"
    running.train(prepare(load_config(None, {**SMALL, "run.folder": str(folder)})))
    rows = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    expected = [(row["step"], row["accuracy"]) for row in rows]
    assert [step for step, _ in expected] == [0, 2, 3]
    for tracker in trackers.values():
        assert tracker.scalars()["eval/accuracy"] == expected
        assert [name for name, _ in tracker.calls].count("init") == 1
    # Killed in the final evaluation: nothing is left to train, and only that evaluation is new.
    (folder / "result.json").unlink()
    (folder / "page.html").unlink()
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]) + '{"step": 3')
    for tracker in trackers.values():
        tracker.calls.clear()
    running.train(prepare(resume_config(folder)), resume=True)
    for tracker in trackers.values():
        assert tracker.scalars()["eval/accuracy"] == expected[2:]
    assert trackers["trackio"].calls[-1][0] == "finish" and trackers["trackio"].of("artifact")
    assert (folder / "page.html").exists()


def test_the_real_tensorboard(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    importlib.import_module("torch.utils.tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trained(policy, tmp_path, report_to="tensorboard")
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    logged = RunFolder(tmp_path / "run").metrics()
    for name in ("credit/acr", "probe/tokens", "seconds/credit", "measure/forwards", "predicted/seconds/generate"):
        found = [(each.step, each.value) for each in events.Scalars(f"train/{name}")]
        assert found == [(row["step"], pytest.approx(row[name])) for row in logged]
    assert events.Tensors("credit/page/text_summary")[0].step == 2
    assert (tmp_path / "events" / "page.html").read_bytes() == (tmp_path / "run" / "page.html").read_bytes()
