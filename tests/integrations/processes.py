"""Two processes of a script that train together, on one machine without a GPU."""

import json
import socket

from tests import unhooked

_SCRIPT = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.multiprocessing as mp
path = sys.argv[1]

def run(rank):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2], "ACCELERATE_USE_CPU": "true"}
    import torch.distributed as dist
    from {module} import {function}
    found = {function}(rank, path)
    print(json.dumps(found), file=open(f"{path}/found-{rank}.json", "w"))
    dist.destroy_process_group()

workers = [mp.get_context("fork").Process(target=run, args=(rank,)) for rank in range(2)]
[worker.start() for worker in workers], [worker.join() for worker in workers]
sys.exit(max(worker.exitcode for worker in workers))
"""


def found_by_two(work, path):
    """What a function of a test's file returns in each of two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = _SCRIPT.replace("{module}", work.__module__).replace("{function}", work.__name__)
    unhooked.run(script, str(path), str(port))
    return [json.loads((path / f"found-{rank}.json").read_text()) for rank in range(2)]


def alike(values):
    """Whether both processes have these tensors."""
    import torch
    import torch.distributed as dist

    rows = [None, None]
    dist.all_gather_object(rows, torch.cat([value.double().flatten() for value in values]))
    return torch.equal(*rows)
