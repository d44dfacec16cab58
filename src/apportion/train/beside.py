"""What a run lays beside its own figures: the prediction of `apportion cost`, and the memory it is set against."""

from __future__ import annotations

import sys

import torch

from apportion.cost import Prediction, Unpredicted, predict_beside
from apportion.cost.predict import PEAK
from apportion.errors import InputError
from apportion.train.prepare import Run


def predicted_for(run: Run) -> Prediction | None:
    """The prediction for a run, where it is wanted and can be made; one line says where from, or why there is none.

    A prediction draws no random number of the run's and never stops it. In several processes the first one makes it.
    """
    config = run.config
    if config.run.predict == "off" or run.args.process_index:
        return None
    try:
        found = predict_beside(config, run.args.world_size, measure=config.run.predict == "measure")
    except (Unpredicted, InputError) as error:
        _say(f"none beside this run: {error}")
    # What a plug-in's plan or a model's configuration may do on text that stands in is not known.
    except Exception as error:
        _say(f"none beside this run: {type(error).__name__}: {error}")
    else:
        _say(f"from {found.hardware.name}, {found.hardware.source}")
        return found
    return None


class Beside:
    """What each row of a run's log gets: `predicted/NAME`, and on a GPU the peak of what torch has allocated.

    A process on a CPU has no figure of its own to set against the predicted memory: its growth counts the allocator and
    the libraries as well.
    """

    def __init__(self, prediction: Prediction, model: torch.nn.Module) -> None:
        self._row = prediction.metrics()
        self._device = next(model.parameters()).device
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def __call__(self) -> dict[str, float]:
        if self._device.type != "cuda":
            return self._row
        return {PEAK: float(torch.cuda.max_memory_allocated(self._device)), **self._row}


def _say(message: str) -> None:
    print("prediction: " + " ".join(message.split()), file=sys.stderr)
