"""What a run will cost, before it starts: tokens, seconds by phase and memory, from a roofline."""

from apportion.cost.hardware import HERE, NAMED, Hardware, Overheads, find_hardware
from apportion.cost.predict import Plan, Prediction, predict
from apportion.cost.recipe import Assumed, Unpredicted, describe, predict_beside, predict_run
from apportion.cost.shape import ModelShape, read_shape
from apportion.cost.standin import Workload

__all__ = [
    "HERE",
    "NAMED",
    "Assumed",
    "Hardware",
    "ModelShape",
    "Overheads",
    "Plan",
    "Prediction",
    "Unpredicted",
    "Workload",
    "describe",
    "find_hardware",
    "predict",
    "predict_beside",
    "predict_run",
    "read_shape",
]
