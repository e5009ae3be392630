"""A process that supervises a worker in which environments run.

Runs as `python -m megarl.environments.keeper SOCKET PARENT`, started by a rank (`megarl.rewards.pool`).
"""

from megarl.environments.host import Host
from megarl.rewards.keeper import main

if __name__ == "__main__":
    main(kind=Host)
