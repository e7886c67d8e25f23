"""Scans: paths of a layer, the recurrence beside its peers, and that of selective layers."""

from __future__ import annotations

from compressm.reports.grid import Grid, duration
from compressm.runs.measurement import Measurement, Row


def scan_grids(measurement: Measurement) -> list[Grid]:
    """One row a shape, one column a path."""
    needed = ("batch", "length", "order", "width", "chosen")
    measurement.require("scan", needed=needed, words=("chosen", "device"))
    paths = list(dict.fromkeys(name for row in measurement.rows for name in row if name.endswith("_s")))
    rows = tuple(
        (
            *(str(row[name]) for name in ("batch", "length", "order", "width")),
            *(_cell(row, path) for path in paths),
            str(row["chosen"]).lower(),
        )
        for row in measurement.rows
    )
    heads = ("batch", "length", "n", "H", *(path.removesuffix("_s") for path in paths), "chosen")
    return [Grid("One layer, forward and backward", heads, rows, "median, by every path")]


def peer_grids(measurement: Measurement) -> list[Grid]:
    """One table a shape and precision, one row a peer; where a peer did not run, why."""
    needed = ("peer", "precision", "batch", "length", "order")
    measurement.require("peers", needed=needed, words=("peer", "precision", "device", "timed", "note"))
    tables: dict[str, list[Row]] = {}
    for row in measurement.rows:
        title = f"batch {row['batch']}, length {row['length']}, n = {row['order']}, {row['precision']}"
        tables.setdefault(title, []).append(row)
    return [_peer_grid(title, rows) for title, rows in tables.items()]


def selective_grids(measurement: Measurement) -> list[Grid]:
    """One row an order."""
    needed = ("batch", "length", "channels", "order", "precision", "forward_s", "both_s")
    measurement.require("selective", needed=needed, words=("precision", "device"))
    tables: dict[str, list[Row]] = {}
    for row in measurement.rows:
        title = "batch {batch}, length {length}, {channels} channels, {precision}".format(**row)
        tables.setdefault(title, []).append(row)
    columns = {"forward": "forward_s", "least": "floor_forward_s", "both": "both_s", "least of both": "floor_both_s"}
    grids = []
    for title, rows in tables.items():
        shown = {head: column for head, column in columns.items() if any(column in row for row in rows)}
        cells = tuple((str(row["order"]), *(_cell(row, column) for column in shown.values())) for row in rows)
        grids.append(Grid(f"Selective scan: {title}", ("n", *shown), cells, "median; both: with backward"))
    return grids


def _peer_grid(title: str, rows: list[Row]) -> Grid:
    cells = tuple(
        (
            str(row["peer"]),
            _cell(row, "forward_s"),
            _cell(row, "both_s"),
            *(f"{float(row[name]):.0e}" if name in row else "" for name in ("error", "gradient_error")),
            str(row.get("note", "")),
        )
        for row in rows
    )
    heads = ("scan", "forward", "both", "error", "gradient", "note")
    return Grid(
        f"h[t] = λ h[t−1] + x[t]: {title}",
        heads,
        cells,
        "median; both: with backward; errors against a loop in float64",
    )


def _cell(row: Row, column: str) -> str:
    return duration(float(row[column])) if column in row else ""
