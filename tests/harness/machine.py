"""A machine with as much memory as a test says, for whoever reads it with a monitor."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from gemini.monitor import monitor
from gemini.monitor.device import EmulatedDevice
from gemini.monitor.host import HostSource


@contextmanager
def machine(device_bytes: int | None = None, host_bytes: int | None = None) -> Iterator[EmulatedDevice]:
    """Inside, monitors find an emulated device of so many bytes, which may be changed, and so many on the host.

    None: a device without a bound, and what the host has.
    """
    device, read = EmulatedDevice(device_bytes), HostSource.read

    def read_host(self: HostSource) -> object:
        found = read(self)
        return found if host_bytes is None else replace(found, available_bytes=host_bytes)

    with mock.patch.object(monitor, "source_of", return_value=device), mock.patch.object(HostSource, "read", read_host):
        yield device
