"""The processes of runs: `python -m polyphily.flower.executor PARENT [conduct]`.

Flower's SuperExec asks the server for runs and starts a process for each. Its own command would put
the token of a run into the process list, which every user of the machine can read, and it has no
way to send the secret that the server's local port needs. So its loop is run here. The token goes
to the process of a run through a pipe, and both processes read the secret from the server's folder.
"""

from __future__ import annotations

import os
import subprocess
import sys

from polyphily.flower import flwr_internals
from polyphily.flower.deployment import Deployment, quiet_flower, read_secret

CONDUCT = "conduct"


def command(parent: int, *more: str) -> list[str]:
    """Return the command of this module; the current folder is not searched for modules."""
    return [sys.executable, "-P", "-m", "polyphily.flower.executor", str(parent), *more]


def main(arguments: list[str]) -> None:
    """Execute runs until the process with the number that is given ends, or conduct one run."""
    deployment = Deployment.of_environment()
    quiet_flower()
    flwr_internals.send_with_every_request(flwr_internals.SECRET, read_secret(deployment))
    address, authority = deployment.control, deployment.path / "ca.crt"
    parent = int(arguments[0])
    if arguments[1:] == [CONDUCT]:
        token = sys.stdin.readline().strip()
        flwr_internals.conduct_run(address, authority, parent, token)
        return

    def launch(token: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command(os.getpid(), CONDUCT),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        process.stdin.write(f"{token}\n".encode("ascii"))
        process.stdin.close()
        return process

    flwr_internals.execute_runs(address, authority, parent, launch)


if __name__ == "__main__":
    main(sys.argv[1:])
