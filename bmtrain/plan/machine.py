"""Descriptions of machines for the planner, and presets of common ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .._base.arguments import require_integer, require_number

__all__ = ["MACHINES", "Machine"]

GB = 1e9
GIB = 2.0**30


@dataclass(frozen=True)
class Machine:
    """Equal nodes of equal devices. Sizes are in bytes, bandwidths in bytes per second and direction, times in seconds.

    Args:
        name: for reports.
        num_nodes: nodes.
        devices_per_node: ranks of a node.
        memory: of one device.
        reserved: the part of it used by the driver, the context and the communication library.
        flops: peak of matrix products in the training dtype, per device and second.
        efficiency: the share of the peak that large products reach.
        memory_bandwidth: of one device.
        link_bandwidth: of one device to the others of its node.
        link_latency: of one message there.
        network_bandwidth: of one node, all its network cards together.
        network_latency: of one message there.
        pcie_bandwidth: of one device to host memory.
        host_memory: of one node.
        host_bandwidth: of one node's host memory.
        source: the source of the numbers.
        shares_memory: ranks of a node are processes that exchange through memory which they all map: their processors
            do the copying, so it overlaps with nothing that they compute.
        disk_bandwidth: of one node's drives together, bytes read and bytes written at the same time.

    Raises:
        ValueError: a number that makes no sense.

    Example:
        >>> from bmtrain.plan import MACHINES
        >>> MACHINES["h100-80gb"].with_devices(64).num_nodes
        8
    """

    name: str
    num_nodes: int
    devices_per_node: int
    memory: float
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    pcie_bandwidth: float
    host_memory: float
    host_bandwidth: float
    reserved: float = 1.5 * GIB
    efficiency: float = 0.55
    link_latency: float = 3e-6
    network_latency: float = 12e-6
    source: str = ""
    shares_memory: bool = False
    disk_bandwidth: float = 3 * GB

    def __post_init__(self) -> None:
        for name in ("num_nodes", "devices_per_node"):
            require_integer(name, getattr(self, name), 1)
        bandwidths = (f"{name}_bandwidth" for name in ("memory", "link", "network", "pcie", "host", "disk"))
        for name in ("memory", "flops", *bandwidths):
            require_number(name, getattr(self, name))
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected more than 0, got {getattr(self, name)}")
        require_number("reserved", self.reserved)
        if not self.memory > self.reserved:
            raise ValueError(
                f"memory: expected more bytes than the {self.reserved:.0f} of reserved, got {self.memory:.0f}"
            )
        require_number("efficiency", self.efficiency)
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency: expected more than 0 and at most 1, got {self.efficiency}")

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def usable_memory(self) -> float:
        """Memory of a device that is available for training."""
        return self.memory - self.reserved

    def sized(self, *, num_nodes: int | None = None, devices_per_node: int | None = None) -> Machine:
        """The same devices, another number of them."""
        return replace(
            self,
            num_nodes=self.num_nodes if num_nodes is None else num_nodes,
            devices_per_node=self.devices_per_node if devices_per_node is None else devices_per_node,
        )

    def with_devices(self, num_devices: int) -> Machine:
        """The same nodes, as many as ``num_devices`` need.

        Raises:
            ValueError: a number above one node's that does not fill its last node.
        """
        if require_integer("num_devices", num_devices, 1) <= self.devices_per_node:
            return self.sized(num_nodes=1, devices_per_node=num_devices)
        if num_devices % self.devices_per_node:
            raise ValueError(
                f"devices: expected a multiple of {self.devices_per_node} (the devices of a node of {self.name}), "
                f"got {num_devices}"
            )
        return self.sized(num_nodes=num_devices // self.devices_per_node)


#: Presets: vendors' data sheets for devices and links; nodes as commonly sold. Values that a sheet omits (host
#: bandwidth, efficiency, latency) are round figures to be replaced by your own: ``--set network_bandwidth=25e9``.
MACHINES = {
    "v100-32gb": Machine(
        name="V100-32GB",
        num_nodes=4,
        devices_per_node=8,
        memory=32 * GIB,
        flops=125e12,
        memory_bandwidth=900 * GB,
        link_bandwidth=150 * GB,
        network_bandwidth=12.5 * GB,
        pcie_bandwidth=12 * GB,
        host_memory=512 * GIB,
        host_bandwidth=150 * GB,
        efficiency=0.5,
        source="NVIDIA V100 data sheet (SXM2); one 100 Gb/s network card a node",
    ),
    "a100-80gb": Machine(
        name="A100-80GB",
        num_nodes=1,
        devices_per_node=8,
        memory=80 * GIB,
        flops=312e12,
        memory_bandwidth=2039 * GB,
        link_bandwidth=300 * GB,
        network_bandwidth=200 * GB,
        pcie_bandwidth=25 * GB,
        host_memory=2048 * GIB,
        host_bandwidth=300 * GB,
        source="NVIDIA A100 data sheet (SXM4); eight 200 Gb/s network cards a node",
    ),
    "h100-80gb": Machine(
        name="H100-80GB",
        num_nodes=1,
        devices_per_node=8,
        memory=80 * GIB,
        flops=989e12,
        memory_bandwidth=3350 * GB,
        link_bandwidth=450 * GB,
        network_bandwidth=400 * GB,
        pcie_bandwidth=50 * GB,
        host_memory=2048 * GIB,
        host_bandwidth=500 * GB,
        source="NVIDIA H100 data sheet (SXM5); eight 400 Gb/s network cards a node",
    ),
}
MACHINES["h200-141gb"] = replace(
    MACHINES["h100-80gb"],
    name="H200-141GB",
    memory=141 * GB,
    memory_bandwidth=4800 * GB,
    source="NVIDIA H200 data sheet (SXM5); eight 400 Gb/s network cards a node",
)
