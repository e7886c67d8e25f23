"""`python -m tests.regression.pin` writes `pinned.json` anew, by the library in src: only after a wanted change."""

import json
import tempfile
from pathlib import Path

from tests.regression.trainings import ANY_PROCESSOR, HERE, ROOT, train_all

PINNED = HERE / "pinned.json"


def written(found):
    """JSON with a line for every list of numbers and every record."""
    runs = []
    for name, run in found.items():
        parts = [f'  "{part}": {_rows(value)}' for part, value in run.items()]
        runs.append(f' "{name}": {{\n' + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(runs) + "\n}\n"


def _rows(value):
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"   {json.dumps(row)}" for row in value) + "\n  ]"
    return json.dumps(value)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PINNED.write_text(written(train_all(ROOT, Path(folder), **ANY_PROCESSOR)))
    print(f"wrote {PINNED}")
