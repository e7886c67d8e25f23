import torch

from compressm_lab.bench.scans import Sizes, floors, measure_selective
from compressm_lab.reports.measurements import markdown


def test_every_order_is_timed_forward_and_with_gradients():
    measurement = measure_selective([3, 5], sizes=Sizes(2, 16, 4, torch.float32), repeats=1)
    assert [row["order"] for row in measurement.rows] == [3, 5]
    assert all(float(row["forward_s"]) > 0 and float(row["both_s"]) > 0 for row in measurement.rows)
    assert "| 5 |" in markdown(measurement)


def test_the_least_time_counts_exponentials_or_bytes(monkeypatch):
    class Device:
        clock_rate, multi_processor_count = 1_000_000, 100

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Device)
    sizes = Sizes(2, 100, 50, torch.bfloat16)
    # 16 · 100 · 1e9 exponentials a second, of which n = 80 needs 2 · 100 · 50 · 80.
    forward, both = floors(80, sizes, torch.device("cuda"), 1e15)
    assert abs(forward - 800_000 / 1.6e12) < 1e-12
    assert abs(both - 2 * forward) < 1e-12
    # With slow memory: u, Δ and y, and B and C, of 2 bytes each.
    forward, _ = floors(1, sizes, torch.device("cuda"), 1e6)
    assert abs(forward - (3 * 2 * 100 * 50 * 2 + 2 * 2 * 100 * 2) / 1e6) < 1e-9
