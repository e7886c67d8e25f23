"""On which machine, when and at which commit a number was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch


@dataclass(frozen=True)
class Environment:
    """Stored with every measurement."""

    date: str
    commit: str
    processor: str
    cores: int
    accelerator: str | None
    python: str
    torch: str
    threads: int

    @classmethod
    def here(cls) -> Environment:
        """Of this process, now."""
        return cls(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=_commit(),
            processor=_processor(),
            cores=os.cpu_count() or 1,
            accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            python=platform.python_version(),
            torch=torch.__version__,
            threads=torch.get_num_threads(),
        )

    @property
    def machine(self) -> str:
        """What computed: the accelerator, where there is one."""
        return self.accelerator or self.processor


def _commit() -> str:
    """The commit of the source tree, marked where it has changed since; `COMPRESSM_COMMIT` where there is no git."""
    if given := os.environ.get("COMPRESSM_COMMIT"):
        return given
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        state = subprocess.run(
            ["git", "status", "--porcelain", "--", "."], cwd=here.parent, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip()[:12] + ("+changes" if state.stdout.strip() else "")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
