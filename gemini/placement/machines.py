"""Published figures of well-known machines, to plan for clusters that are not at hand. Nothing here is measured.

Published figures are peaks. Real kernels, links and collectives reach a part of them, so modelled times are a floor
and utilisations a ceiling. Launch times of collectives are not published, and count as 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemini.placement.rates import Rates

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


def _dgx(
    name: str,
    *,
    device_bytes: int,
    matrix_flops: float,
    tf32_flops: float,
    device_memory: float,
    nvlink: float,
    pcie: float,
    host_memory: float,
    network: float,
    source: str,
) -> Machine:
    """A node of eight devices. Bandwidths: bytes per second in one direction; `host_memory` is of the whole node."""
    rates = Rates(
        source=f"published figures of {name}, which are peaks",
        # fp32 weights: the rate of TF32, which torch uses if `allow_tf32` is set.
        flops_per_s={"bfloat16": matrix_flops, "float16": matrix_flops, "float32": tf32_flops},
        device_memory_bytes_per_s=device_memory,
        host_memory_bytes_per_s=host_memory / 8,
        to_device_bytes_per_s=pcie,
        to_host_bytes_per_s=pcie,
        device_update_bytes_per_s=device_memory,  # Adam is memory-bound
        host_update_bytes_per_s=host_memory / 8,
        node_bytes_per_s=nvlink,
        network_bytes_per_s=network,
    )
    return Machine(
        name=name, ranks_per_node=8, device_bytes=device_bytes, host_bytes=2 * 10**12, rates=rates, source=source
    )


MACHINES = {
    machine.name: machine
    for machine in (
        _dgx(
            "dgx-a100-80gb",
            device_bytes=80 * 10**9,
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
        _dgx(
            "dgx-h100",
            device_bytes=80 * 10**9,
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
        _dgx(
            "dgx-h200",
            device_bytes=141 * 10**9,
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
