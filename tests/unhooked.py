"""Plain Python without the tests' shape checker: one process loads the library, and a fork of it runs each script."""

import atexit
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

_SERVER = """
import json, os, signal, sys, traceback
import torch
import compressm.compression, compressm.layers, compressm.models

torch.set_num_threads(1)

def run(script, arguments, folder):
    for number, name in ((0, os.devnull), (1, f"{folder}/stdout"), (2, f"{folder}/stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    os.setsid()
    signal.alarm(120)
    sys.argv = ["-c", *arguments]
    try:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(*json.loads(line))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.killpg(child, signal.SIGKILL)  # what the script may have left running
    except ProcessLookupError:
        pass
    print(code, flush=True)
"""

_OUTCOMES = """
import json, sys

def outcome(expression):
    try:
        eval(expression)
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return [], "no error"

print(json.dumps({case: outcome(expression) for case, expression in json.loads(sys.argv[1]).items()}))
"""


@functools.cache
def _server():
    command = [sys.executable, "-c", _SERVER]
    server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)
    return server


def run(script: str, *arguments: str) -> str:
    """What the script prints; it must end without an error."""
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps([script, arguments, folder]), file=server.stdin, flush=True)
        code = server.stdout.readline().strip()
        assert code == "0", (code, Path(folder, "stderr").read_text())
        return Path(folder, "stdout").read_text()


def outcomes(preamble: str, expressions: dict[str, str]) -> dict[str, tuple[list[str], str]]:
    """{case: (names of the error's classes, message)}, an empty list for no error."""
    return json.loads(run(preamble + _OUTCOMES, json.dumps(expressions)))
