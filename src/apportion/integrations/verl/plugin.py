"""What verl loads, by the entry point `verl.plugins`: importing this registers everything that apportion adds to it.

Trainers, read by `trainer.v1.trainer_mode`: apportion_sync, apportion_colocate_async, apportion_separate_async.
Estimators, read by `algorithm.adv_estimator`: apportion_NAME of each method that needs nothing but rewards.
Rollout engine, read by `actor_rollout_ref.rollout.name`: apportion_transformers, which runs on a CPU.

verl passes over a plugin that fails to load, so the reason is printed here.
"""

from __future__ import annotations

import sys

from apportion.integrations.verl.versions import check_verl

try:
    check_verl()

    # Registered as they are imported, except for the estimators.
    from apportion.integrations.verl import estimators, replica, trainer

    estimators.register()
except Exception as error:
    print(f"apportion's plugin for verl is not loaded: {error}", file=sys.stderr, flush=True)
    raise

__all__ = ["estimators", "replica", "trainer"]
