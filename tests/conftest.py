"""Settings of every test: one thread, the same hypothesis examples on every run, slow tests only where asked for."""

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

# A shell's background job ignores Ctrl-C, and so would every command that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)
settings.register_profile("apportion", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("apportion")


def pytest_collection_modifyitems(config, items):
    """`slow` tests run where APPORTION_SLOW=1 is set or where -m selects by marker."""
    if os.environ.get("APPORTION_SLOW") == "1" or config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason="slow: minutes long; run by `make evidence`, or with APPORTION_SLOW=1")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
