"""Global random streams, left where they were.

vLLM in the same process draws from all three of them: its start seeds them, its sampler draws from torch's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def frozen_rng() -> Iterator[None]:
    """Whatever happens inside leaves every global random stream where it was."""
    python, numpy = random.getstate(), np.random.get_state()
    # Asking about other CUDA devices than the one in use would claim memory on them.
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
