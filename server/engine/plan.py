"""The memory plan of the device that an engine runs on."""

from __future__ import annotations

from collections.abc import Sequence

from server.engine.device import Device
from server.engine.drafters.entry import Entry
from server.engine.memory import Demand, MemoryPlan, plan_cpu
from server.settings.config import EngineConfig
from verifier.model.config import ModelConfig


def plan(
    config: EngineConfig, length: int, dtype: str, target: ModelConfig, drafters: Sequence[Entry], device: Device
) -> MemoryPlan:
    """The pages: ``kv_tokens`` if given, else what the device has room for.

    length: the longest text. drafters: those that will be loaded.
    Raises Unfit if the longest text does not fit the KV cache, or everything together not the device, and a loader's
    error for a drafter that cannot be read.
    """
    if device.is_gpu:
        from server.engine.gpu_memory import plan_gpu  # knows the kernels, which a CPU does without

        return plan_gpu(config, length, dtype, target, drafters, device)
    return plan_cpu(config, length, Demand.of(config, dtype, target, drafters), device)
