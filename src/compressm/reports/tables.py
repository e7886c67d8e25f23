"""Measurements as Markdown."""

from __future__ import annotations

from compressm.runs.measurement import Measurement, MeasurementError


def reduction_markdown(measurement: Measurement) -> str:
    """One row a size, milliseconds, for `compressm bench reduction`."""
    if measurement.name != "reduction" or not measurement.rows:
        raise MeasurementError(f"{measurement.name} is not a result of `compressm bench reduction`")
    compared = all("plain_reduction_s" in row for row in measurement.rows)
    heads = ["n → r", "channels", "system", "σ alone", "whole reduction"]
    heads += ["σ, plain formulas", "whole, plain formulas", "ratio"] if compared else []
    lines = [heads, ["---:"] * len(heads)]
    for row in measurement.rows:
        several = f"{row['members']} × " if row["members"] != 1 else ""
        cells = [f"{several}{row['order']} → {row['rank']}", str(row["width"]), str(row["system"])]
        columns = ["hankel_s", "reduction_s", *(["plain_hankel_s", "plain_reduction_s"] if compared else [])]
        cells += [_duration(float(row[column])) for column in columns]
        lines.append([*cells, f"{float(row['speedup']):.1f}"] if compared else cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
