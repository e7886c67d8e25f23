"""`compressm bench`: measure on this machine."""

from __future__ import annotations

import typer

from compressm.cli.bench import cut, growth, reduction, regulariser, results, scan, speedup, step

bench = typer.Typer(help="Measure speed on this machine; results are JSON files with a picture.", no_args_is_help=True)
for command in (
    reduction.reduction,
    cut.cut,
    step.step,
    growth.growth,
    regulariser.regulariser,
    speedup.speedup,
    scan.scan,
    scan.peers,
    scan.selective,
    results.table,
    results.draw,
):
    bench.command()(command)
