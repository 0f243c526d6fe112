"""A host with as much memory as a test says, for whoever reads it with a monitor. Devices: `gemini.EmulatedDevice`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from gemini.monitor.readings import HostSource


@contextmanager
def host_with(available_bytes: int) -> Iterator[None]:
    """Inside, monitors find so many bytes available on the host."""
    read = HostSource.read

    def read_host(self: HostSource) -> object:
        return replace(read(self), available_bytes=available_bytes)

    with mock.patch.object(HostSource, "read", read_host):
        yield
