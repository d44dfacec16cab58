"""A platform of verl without an accelerator, for a run on a laptop: `VERL_PLATFORM=cpu` and `trainer.device=cpu`.

Ray is told that there are GPUs (`ray_kwargs.ray_init.num_gpus`), one for each rank, which nobody touches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.distributed import init_process_group, is_initialized
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _Device(ModuleType):
    """`torch.cpu`, and what callers of `torch.cuda` ask for beside it: there is no memory of its own to manage."""

    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def empty_cache(self) -> None:
        pass

    def ipc_collect(self) -> None:
        pass

    def memory_allocated(self, *_: Any) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        """Bytes that are free and bytes in all, of the machine."""
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def get_device_name(self, *_: Any) -> str:
        return "cpu"


_DEVICE = _Device("cpu")


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """What verl asks of a platform, answered for a CPU with gloo."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # Never found by itself: a machine with a GPU that is busy would train on its CPU.
        return False

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        """`gloo`; in a worker that has a rank it joins the process group first.

        verl asks for this to start a group of "cpu:gloo,cpu:gloo", which torch refuses, unless there is one by then.
        """
        if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys() and not is_initialized():
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            where = os.environ.get("DIST_INIT_METHOD")
            init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
