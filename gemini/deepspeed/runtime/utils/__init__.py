"""`deepspeed.runtime.utils`: where the memory is."""

from __future__ import annotations

from gemini.deepspeed.accelerator import get_accelerator
from gemini.elsewhere import refusing
from gemini.log import get_dist_logger
from gemini.monitor.live import MemoryMonitor
from gemini.placement.demand import format_bytes

__all__ = ["see_memory_usage"]


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log on rank 0 what the device and the host have in use, and let the device's peaks begin again. Local.

    force: False does nothing, so that calls may stay in a script.
    """
    if not force:
        return
    device, host = get_accelerator(), MemoryMonitor().read_host()
    allocated, cached = (
        f"{format_bytes(now)} (at most {format_bytes(peak)})"
        for now, peak in (
            (device.memory_allocated(), device.max_memory_allocated()),
            (device.memory_reserved(), device.max_memory_reserved()),
        )
    )
    used = f"{format_bytes(host.used_bytes)} of {format_bytes(host.total_bytes)}"
    get_dist_logger().info(
        f"{message}: {device.device_name()} allocated {allocated}, cached {cached}; host {used} in use", ranks=[0]
    )
    device.reset_peak_memory_stats()


__getattr__ = refusing(__name__)
