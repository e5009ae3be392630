"""A process that supervises a worker in which environments run.

Runs as `python -m megarl.environments.supervisor SOCKET PARENT`, started by a rank (`megarl.sandbox.pool`).
"""

from megarl.environments.host import Host
from megarl.sandbox.supervisor import main

if __name__ == "__main__":
    main(kind=Host)
