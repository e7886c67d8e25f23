"""`compressm bench scan`, `compressm bench peers` and `compressm bench selective`."""

from __future__ import annotations

from compressm.cli.bench.options import OUT, Device, DeviceOption, OutOption, RepeatsOption, require
from compressm.cli.bench.terminal import measuring, report


def scan(device: DeviceOption = Device.cpu, repeats: RepeatsOption = 9, out: OutOption = OUT) -> None:
    """One layer by every path, scan, chunks and convolution, beside the path the cost rule picks."""
    from compressm.bench.scan_paths import measure_paths

    result = out / f"scan-{device.value}.json"
    require(device, result)
    with measuring() as say:
        measurement = measure_paths(device=device.value, repeats=repeats, progress=say)
    report(measurement, result)


def peers(device: DeviceOption = Device.cpu, repeats: RepeatsOption = 9, out: OutOption = OUT) -> None:
    """The recurrence h ← λh + x beside a PyTorch loop, torch's associative scan and scan packages installed here."""
    from compressm.bench.peers import measure_peers

    result = out / f"peers-{device.value}.json"
    require(device, result)
    with measuring() as say:
        measurement = measure_peers(device=device.value, repeats=repeats, progress=say)
    report(measurement, result)


def selective(device: DeviceOption = Device.cpu, repeats: RepeatsOption = 9, out: OutOption = OUT) -> None:
    """The scan of Mamba layers at orders from 128 to 8, on a GPU beside the least time it could take."""
    from compressm.bench.selective import measure_selective

    result = out / f"selective-{device.value}.json"
    require(device, result)
    with measuring() as say:
        measurement = measure_selective(device=device.value, repeats=repeats, progress=say)
    report(measurement, result)
