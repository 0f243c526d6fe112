"""Rates of machines: bytes moved and FLOPs computed per second, measured or published. Pure numbers, without torch.

`gemini/monitor/rates.py` measures the rates of this machine, `MACHINES` has published ones, and a JSON file may have
others (`Rates.to_json`). Only modelled seconds depend on them: no plan and no result does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

# One rank, or one node, has no such link to measure, and a disk is measured where one is named.
_MAY_BE_UNKNOWN = ("node_bytes_per_s", "network_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of one rank. Except for those between ranks, each holds while no other rank is busy.

    Args:
        source: the origin of the figures: "measured on ..." or "published by ...".
        flops_per_s: rate of matrix products on the device, by the dtype's name.
        device_memory_bytes_per_s: bytes read and written on the device.
        host_memory_bytes_per_s: the same in host memory.
        to_device_bytes_per_s: over the link from the host.
        to_host_bytes_per_s: over the link to the host.
        device_update_bytes_per_s: bytes that Adam's update reads and writes on the device.
        host_update_bytes_per_s: the same in host memory, with one rank's share of the cores.
        node_bytes_per_s: rate at which a rank sends to ranks of its node. None: unknown.
        network_bytes_per_s: rate at which a rank sends to other nodes. None: unknown.
        disk_read_bytes_per_s: from the disk to host memory, while as much is written. None: unknown.
        disk_write_bytes_per_s: the other way, while as much is read. None: unknown.
        collective_s: seconds that a collective takes in addition to the time of its bytes.

    Raises ValueError for a number that is not positive and finite; `collective_s` may be 0.
    """

    source: str
    flops_per_s: Mapping[str, float]
    device_memory_bytes_per_s: float
    host_memory_bytes_per_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    device_update_bytes_per_s: float
    host_update_bytes_per_s: float
    node_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    collective_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source:
            raise ValueError(f"source must be a text, found {self.source!r}")
        if not isinstance(self.flops_per_s, Mapping) or not self.flops_per_s:
            raise ValueError(f"flops_per_s must have a number for each dtype, found {self.flops_per_s!r}")
        for dtype, value in self.flops_per_s.items():
            _check(f"flops_per_s of {dtype}", value)
        # The first two fields are no numbers, and are checked above.
        for each in fields(self)[2:]:
            value = getattr(self, each.name)
            if value is not None or each.name not in _MAY_BE_UNKNOWN:
                _check(each.name, value, may_be_zero=each.name == "collective_s")

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads."""
        # `flops_per_s` may be any mapping, and json writes dicts only.
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"flops_per_s": dict(self.flops_per_s)}

    @staticmethod
    def from_json(found: object) -> Rates:
        """Rates from a JSON object. Raises ValueError for an object that `to_json` would not have written."""
        names = [each.name for each in fields(Rates)]
        if not isinstance(found, dict):
            raise ValueError(f"rates are an object with the keys {', '.join(names)}, found {type(found).__name__}")
        # A misspelt key would otherwise be ignored, and the default taken in its place.
        unknown = sorted(set(found) - set(names))
        # A key that may be missing has a default: the rate is unknown, or the collective costs no extra time.
        missing = [name for name in names if name not in found and name not in (*_MAY_BE_UNKNOWN, "collective_s")]
        if unknown or missing:
            what = f"has no {missing[0]!r}" if missing else f"has {unknown[0]!r}, which is no rate"
            raise ValueError(f"the object {what}; its keys are {', '.join(names)}")
        return Rates(**found)


def _check(name: str, value: object, may_be_zero: bool = False) -> None:
    # JSON allows NaN and true, and Python takes a bool for an int: none of them is a rate.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not (value > 0 or (may_be_zero and value == 0)):  # type: ignore[operator]
        raise ValueError(f"{name} must be a finite number above 0, found {value!r}")


# -- Published figures of well-known machines, to plan for clusters that are not at hand. Nothing here is measured.
#
# Published figures are peaks. Real kernels, links and collectives reach a part of them, so modelled times are a floor
# and utilisations a ceiling. Launch times of collectives are not published, and count as 0.


THIS = "this"  # the name, on the command line, of the machine that it runs on


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node, by the figures of its maker.

    Args:
        name: the name on the command line.
        ranks_per_node: the number of devices, one for each rank.
        device_bytes: memory of each device.
        host_bytes: memory of the node, shared by all of its ranks.
        rates: rates of one rank. A rate that the node's ranks share is divided by their number.
        source: the documents with the figures.
    """

    name: str
    ranks_per_node: int
    device_bytes: int
    host_bytes: int
    rates: Rates
    source: str


def _published(
    name: str,
    *,
    device_bytes: int,
    matrix_flops: float,
    tf32_flops: float,
    device_memory: float,
    pcie: float,
    host_bytes: int,
    host_memory: float,
    source: str,
    nvlink: float | None = None,
    network: float | None = None,
    devices: int = 1,
) -> Machine:
    """A node of so many devices, with its host or their part of one. Bandwidths: bytes per second in one direction.

    Without NVLink ranks of a node exchange over PCIe. network: None: it is not known.
    """
    rates = Rates(
        source=f"published figures of {name}, which are peaks",
        # fp32 weights: the rate of TF32, which torch uses if `allow_tf32` is set.
        flops_per_s={"bfloat16": matrix_flops, "float16": matrix_flops, "float32": tf32_flops},
        device_memory_bytes_per_s=device_memory,
        host_memory_bytes_per_s=host_memory / devices,
        to_device_bytes_per_s=pcie,
        to_host_bytes_per_s=pcie,
        device_update_bytes_per_s=device_memory,  # Adam is memory-bound
        host_update_bytes_per_s=host_memory / devices,
        node_bytes_per_s=pcie if nvlink is None else nvlink,
        network_bytes_per_s=network,
    )
    return Machine(
        name=name, ranks_per_node=devices, device_bytes=device_bytes, host_bytes=host_bytes, rates=rates, source=source
    )


_GEN4, _GEN5 = 32e9, 64e9  # PCIe x16 in one direction

MACHINES = {
    machine.name: machine
    for machine in (
        _published(
            "rtx3090",
            device_bytes=24 * 10**9,
            matrix_flops=71e12,  # with sums in fp32
            tf32_flops=35.6e12,
            device_memory=936e9,
            pcie=_GEN4,
            host_bytes=64 * 10**9,
            host_memory=51.2e9,
            source="NVIDIA Ampere GA102 whitepaper (dense); a desktop with 64 GB in two channels of DDR4-3200",
        ),
        _published(
            "rtx4090",
            device_bytes=24 * 10**9,
            matrix_flops=165.2e12,  # with sums in fp32
            tf32_flops=82.6e12,
            device_memory=1008e9,
            pcie=_GEN4,
            host_bytes=64 * 10**9,
            host_memory=89.6e9,
            source="NVIDIA Ada GPU architecture whitepaper (dense); a desktop with 64 GB in two channels of DDR5-5600",
        ),
        _published(
            "a10",
            device_bytes=24 * 10**9,
            matrix_flops=125e12,
            tf32_flops=62.5e12,
            device_memory=600e9,
            pcie=_GEN4,
            host_bytes=64 * 2**30,
            host_memory=34e9,
            source="NVIDIA A10 datasheet (dense); host memory of AWS g5.4xlarge and its part of two EPYC 7R32",
        ),
        _published(
            "l40s",
            device_bytes=48 * 10**9,
            matrix_flops=362e12,
            tf32_flops=183e12,
            device_memory=864e9,
            pcie=_GEN4,
            host_bytes=128 * 2**30,
            host_memory=34e9,
            source="NVIDIA L40S datasheet (dense); host memory of AWS g6e.4xlarge and its part of two EPYC 7R13",
        ),
        _published(
            "a100-40gb",
            device_bytes=40 * 10**9,
            matrix_flops=312e12,
            tf32_flops=156e12,
            device_memory=1555e9,
            pcie=_GEN4,
            nvlink=300e9,
            host_bytes=85 * 10**9,
            host_memory=35e9,
            source="NVIDIA A100 datasheet (SXM, dense); host: part of a Google Cloud a2-highgpu-1g",
        ),
        _published(
            "a100-80gb",
            device_bytes=80 * 10**9,
            matrix_flops=312e12,
            tf32_flops=156e12,
            device_memory=2039e9,
            pcie=_GEN4,
            nvlink=300e9,
            host_bytes=170 * 10**9,
            host_memory=35e9,
            source="NVIDIA A100 datasheet (SXM, dense); host: part of a Google Cloud a2-ultragpu-1g",
        ),
        _published(
            "h100",
            device_bytes=80 * 10**9,
            matrix_flops=989e12,
            tf32_flops=494e12,
            device_memory=3350e9,
            pcie=_GEN5,
            nvlink=450e9,
            host_bytes=234 * 10**9,
            host_memory=76.8e9,
            source="NVIDIA H100 datasheet (SXM, dense); host: part of a Google Cloud a3-highgpu-1g",
        ),
        _published(
            "h200",
            device_bytes=141 * 10**9,
            matrix_flops=989e12,
            tf32_flops=494e12,
            device_memory=4800e9,
            pcie=_GEN5,
            nvlink=450e9,
            host_bytes=256 * 2**30,
            host_memory=76.8e9,
            source="NVIDIA H200 datasheet (SXM, dense); an eighth of the host of AWS p5en.48xlarge",
        ),
        _published(
            "dgx-a100-80gb",
            devices=8,
            device_bytes=80 * 10**9,
            host_bytes=2 * 10**12,
            matrix_flops=312e12,
            tf32_flops=156e12,
            device_memory=2039e9,
            nvlink=300e9,  # 600 GB/s in both directions
            pcie=32e9,  # gen 4, 64 GB/s in both directions
            host_memory=2 * 204.8e9,  # two sockets with eight channels of DDR4-3200 each
            network=25e9,  # eight adapters of 200 Gb/s
            source=(
                "NVIDIA A100 Tensor Core GPU datasheet (SXM, 80 GB, dense); NVIDIA DGX A100 640GB datasheet; "
                "AMD EPYC 7742 product page (memory bandwidth)"
            ),
        ),
        _published(
            "dgx-h100",
            devices=8,
            device_bytes=80 * 10**9,
            host_bytes=2 * 10**12,
            matrix_flops=989e12,
            tf32_flops=494e12,
            device_memory=3350e9,
            nvlink=450e9,  # 900 GB/s in both directions
            pcie=64e9,  # gen 5, 128 GB/s in both directions
            host_memory=2 * 307.2e9,  # two sockets with eight channels of DDR5-4800 each
            network=50e9,  # eight adapters of 400 Gb/s
            source=(
                "NVIDIA H100 Tensor Core GPU datasheet (SXM, dense: half of the figures with sparsity); NVIDIA DGX "
                "H100 datasheet; Intel Xeon Platinum 8480C (eight channels of DDR5-4800)"
            ),
        ),
        _published(
            "dgx-h200",
            devices=8,
            device_bytes=141 * 10**9,
            host_bytes=2 * 10**12,
            matrix_flops=989e12,
            tf32_flops=494e12,
            device_memory=4800e9,
            nvlink=450e9,
            pcie=64e9,
            host_memory=2 * 307.2e9,
            network=50e9,
            source=(
                "NVIDIA H200 Tensor Core GPU datasheet (SXM, dense: half of the figures with sparsity); NVIDIA DGX "
                "H200 datasheet; Intel Xeon Platinum 8480C (eight channels of DDR5-4800)"
            ),
        ),
    )
}
"""Machines by name. Links have the rate of one direction: half of the figure that is published for both."""
