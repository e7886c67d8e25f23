"""Plain Python without the shape checker of tests: one process loads torch, one the library, and forks run scripts."""

import atexit
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

_SERVER = """
import gc, json, os, signal, sys, traceback
import torch, torch._dynamo

torch.set_num_threads(1)

def run(script, arguments, folder):
    for number, name in ((0, os.devnull), (1, f"{folder}/stdout"), (2, f"{folder}/stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    os.setsid()
    signal.alarm(300)
    sys.argv = ["-c", *arguments]
    try:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int):
            print(code or "", file=sys.stderr)
            code = 1 if code else 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)

def forked(line):
    child = os.fork()
    if child == 0:
        run(*json.loads(line)[1:])
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.killpg(child, signal.SIGKILL)  # what the script may have left running
    except ProcessLookupError:
        pass
    return code

(asked, ask), (answered, answer) = os.pipe(), os.pipe()
if os.fork() == 0:
    os.close(ask)
    import compressm.compression, compressm.layers, compressm.models
    gc.freeze()  # what is loaded stays: no fork need look at it
    for line in os.fdopen(asked):
        os.write(answer, f"{forked(line)}\\n".encode())
    os._exit(0)
os.close(asked), os.close(answer)  # so that an answer ends where the other process does
gc.freeze()
answers = os.fdopen(answered)
for line in sys.stdin:
    if json.loads(line)[0]:
        os.write(ask, line.encode())
        print(answers.readline().strip(), flush=True)
    else:
        print(forked(line), flush=True)
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


def run(script: str, *arguments: str, loaded: bool = True, code: int | Sequence[int] = 0) -> str:
    """What the script prints, which must end with this code, or one of these; not `loaded`, only torch is there."""
    return finished(script, *arguments, loaded=loaded, code=code).stdout


def finished(
    script: str, *arguments: str, loaded: bool = True, code: int | Sequence[int] = 0
) -> subprocess.CompletedProcess[str]:
    """As `run`, with what the script said of errors."""
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps([loaded, script, arguments, folder]), file=server.stdin, flush=True)
        found, said = int(server.stdout.readline()), [Path(folder, name).read_text() for name in ("stdout", "stderr")]
    assert found in ([code] if isinstance(code, int) else code), (found, said[1])
    return subprocess.CompletedProcess(script, found, *said)


def outcomes(preamble: str, expressions: dict[str, str]) -> dict[str, tuple[list[str], str]]:
    """{case: (names of the error's classes, message)}, an empty list for no error."""
    return json.loads(run(preamble + _OUTCOMES, json.dumps(expressions)))
