"""What this machine was measured at, kept so that a run can be predicted without being delayed.

One JSON file for each model shape, arithmetic and number of threads, in `$XDG_CACHE_HOME/apportion` or
`~/.cache/apportion`. Figures of another processor, torch or release of this package are not used.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from apportion import __version__
from apportion.cost.calibrate import arithmetic, calibrate_for
from apportion.cost.hardware import Hardware, Overheads
from apportion.cost.shape import read_shape

if TYPE_CHECKING:
    from apportion.train.settings import RunConfig


def kept_machine(config: RunConfig) -> Hardware | None:
    """The figures that `measured_machine` kept for such a run; None where there are none that can be read.

    Raises:
        InputError: a model that cannot be found.
    """
    key = _key(config)
    try:
        found = json.loads(_file(key).read_text(encoding="utf-8"))
        return _hardware(found["hardware"]) if found["key"] == key else None
    # Whatever a file that this did not write, or not to the end, may hold.
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError):
        return None


def measured_machine(config: RunConfig) -> tuple[Hardware, bool]:
    """This machine, measured now, and whether the figures could be kept for later runs.

    Raises:
        InputError: a model that cannot be found.
    """
    key, machine = _key(config), calibrate_for(config)
    machine = replace(machine, source=f"{machine.source}, {datetime.date.today().isoformat()}")
    figures = {name: value for name, value in asdict(machine).items() if value != math.inf}
    try:
        file = _file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}.part")
        partial.write_text(json.dumps({"key": key, "hardware": figures}, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, file)
    except (OSError, RuntimeError):
        return machine, False
    return machine, True


def _key(config: RunConfig) -> dict[str, Any]:
    from apportion.train.models import model_folder

    return {
        "apportion": __version__, "torch": torch.__version__, "processor": _processor(), "cores": os.cpu_count(),
        "threads": config.run.threads or torch.get_num_threads(), "arithmetic": arithmetic(config),
        "shape": asdict(read_shape(model_folder(config.model.name))),
    }  # fmt: skip


def _file(key: dict[str, Any]) -> Path:
    """RuntimeError where nobody knows the user's home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache / "apportion" / f"machine-{name}.json"


def _hardware(figures: dict[str, Any]) -> Hardware:
    pairs = tuple((float(size), float(rate)) for size, rate in figures["bandwidth"])
    return Hardware(**{**figures, "bandwidth": pairs, "overheads": Overheads(**figures["overheads"])})


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
