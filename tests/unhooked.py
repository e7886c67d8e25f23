"""Run expressions in one plain Python process, without the tests' shape checker, which would refuse bad input first."""

import json
import subprocess
import sys

_REST = """
import json, sys

def outcome(expression):
    try:
        eval(expression)
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return [], "no error"

json.dump({case: outcome(expression) for case, expression in json.load(sys.stdin).items()}, sys.stdout)
"""


def outcomes(preamble: str, expressions: dict[str, str]) -> dict[str, tuple[list[str], str]]:
    """{case: (names of the error's classes, message)}, an empty list for no error."""
    child = subprocess.run(
        [sys.executable, "-c", preamble + _REST],
        input=json.dumps(expressions),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)
