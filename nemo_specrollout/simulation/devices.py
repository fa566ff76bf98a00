# SPDX-License-Identifier: Apache-2.0
"""GPUs by their public data sheets: dense peaks (never "with sparsity"), and link bandwidth in one direction."""

from dataclasses import dataclass

from nemo_specrollout.config.strict import ConfigError, nearest


@dataclass(frozen=True)
class Device:
    """Figures of a GPU's data sheet."""

    name: str
    source: str
    """Name of the data sheet."""
    bf16_flops: float
    """Dense operations a second in bf16."""
    fp8_flops: float | None
    """Dense operations a second in fp8; None if the tensor cores do not support it."""
    hbm_bytes_per_s: float
    """Memory bandwidth."""
    hbm_bytes: float
    """Memory size."""
    nvlink_bytes_per_s: float
    """Bandwidth within the NVLink domain, in one direction."""
    nvlink_gpus: int
    """GPUs in an NVLink domain."""
    network_bytes_per_s: float
    """Bandwidth to other GPUs: the network adapter of the system in the data sheet."""

    def flops(self, precision: str) -> float:
        """Returns the dense operations a second in `bf16` or `fp8`. Raises ConfigError if the GPU lacks that precision."""
        peak = self.bf16_flops if precision == "bf16" else self.fp8_flops
        if peak is None:
            raise ConfigError(
                f"precision: {precision!r}; {self.name} has no such tensor cores: use bf16, or another device"
            )
        return peak

    def link_bytes_per_s(self, num_gpus: int) -> float:
        """Returns the bandwidth between the GPUs of a group of `num_gpus`."""
        return self.nvlink_bytes_per_s if num_gpus <= self.nvlink_gpus else self.network_bytes_per_s


_A100 = "NVIDIA A100 80GB data sheet (SXM); DGX A100 data sheet for the network"
_H100 = "NVIDIA H100 data sheet (SXM); DGX H100 data sheet for the network"
_H200 = "NVIDIA H200 data sheet (SXM); DGX H200 data sheet for the network"
_B200 = "NVIDIA DGX B200 data sheet, an eighth of it"
_GB200 = "NVIDIA GB200 NVL72 data sheet, a seventy-second of it; ConnectX-7 of the DGX GB200 data sheet"

DEVICES = {
    device.name: device
    for device in (
        Device("A100", _A100, 312e12, None, 2.039e12, 80e9, 300e9, 8, 25e9),
        Device("H100", _H100, 989e12, 1979e12, 3.35e12, 80e9, 450e9, 8, 50e9),
        Device("H200", _H200, 989e12, 1979e12, 4.8e12, 141e9, 450e9, 8, 50e9),
        Device("B200", _B200, 2.25e15, 4.5e15, 8e12, 180e9, 900e9, 8, 50e9),
        Device("GB200", _GB200, 2.5e15, 5e15, 8e12, 186e9, 900e9, 72, 50e9),
    )
}


def device_named(name: str, field: str) -> Device:
    """Returns the GPU of that name. Raises ConfigError with the field, the value and the known names."""
    if name not in DEVICES:
        raise ConfigError(f"{field}: {name!r} is not known{nearest(name, DEVICES)}")
    return DEVICES[name]
