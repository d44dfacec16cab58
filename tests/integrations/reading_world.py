"""A world of its own for readings: verl's actor workers, two FSDP2 ranks on gloo, under Ray.

Called with a folder and lines `NAME=VALUE` that override verl's configuration. It reads FOLDER/asked.pickle, the
sampling and the requests, and leaves FOLDER/found.pickle.
"""

from __future__ import annotations

import pickle
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker

FACTOR = 1.05
"""What every weight is multiplied by between two readings."""


class ShiftingWorker(ActorRolloutRefWorker):
    """verl's worker, and a look at what must stay as it is."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shift(self) -> None:
        with torch.no_grad():
            for parameter in self.actor.engine.module.parameters():
                parameter.mul_(FACTOR)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self) -> None:
        self.actor.engine.module.train()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def look(self) -> dict[str, Any]:
        module = self.actor.engine.module
        return {
            "shard": {name: own.to_local().clone() for name, own in module.named_parameters()},
            "learns": [own.requires_grad for own in module.parameters()],
            "grads": sum(own.grad is not None for own in module.parameters()),
            "training": module.training,
            "random": (torch.get_rng_state(), random.getstate()),
        }


def group(config: Any, method: Any) -> Any:
    """The actor's worker group, made as verl's trainer makes it."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls
    from verl.trainer.ppo.utils import Role

    from apportion.integrations.verl.reading import readers_in

    classes = {Role.Actor: ray.remote(ShiftingWorker)}
    readers_in(classes, method)
    actor = RayClassWithInitArgs(
        cls=classes[Role.Actor], config=config.actor_rollout_ref, distillation_config=config.get("distillation"),
        role="actor",
    )  # fmt: skip
    pool = RayResourcePool([2], use_gpu=True, max_colocate_count=1)
    both = create_colocated_worker_cls({"actor": actor})
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=both, device_name="cpu").spawn({"actor"})["actor"]


def main(folder: Path, overrides: list[str]) -> None:
    import ray
    import verl
    from hydra import compose, initialize_config_dir

    from apportion.credit.registry import make_method
    from apportion.integrations.verl.reading import How, Readers

    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        config = compose("ppo_trainer", overrides)
    # The names of Ray's sockets have to be short.
    with tempfile.TemporaryDirectory(prefix="ar", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        ray.init(
            address="local", num_cpus=4, num_gpus=2, include_dashboard=False, _temp_dir=temporary,
            object_store_memory=100_000_000, log_to_driver=False,
        )  # fmt: skip
        workers = group(config, make_method("oar_g", {}))
        workers.init_model()
        workers.train()
        sampling, asked = pickle.loads((folder / "asked.pickle").read_bytes())
        readers = Readers(workers, sampling, 0)
        ats = list(asked)
        random.Random(1).shuffle(ats)
        found: dict[str, Any] = {"before": workers.look(), "first": readers.read(asked)}
        found["after"] = workers.look()
        found["permuted"] = readers.read({at: asked[at] for at in ats})
        found["alone"] = {at: readers.read({at: asked[at]}) for at in ats[:2]}
        found["ranks"] = [list(each) for each, _ in workers.apportion_read(asked, How(sampling, 0))]
        found["bfloat16"] = Readers(workers, sampling, 0, dtype="bfloat16").read(asked)
        workers.shift()
        found["shifted"] = readers.read(asked)
        (folder / "found.pickle").write_bytes(pickle.dumps(found))
        ray.shutdown()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    # Ray's workers import the worker's class by its module's name.
    import reading_world

    reading_world.main(Path(sys.argv[1]), sys.argv[2:])
