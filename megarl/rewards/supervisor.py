"""A process that supervises a worker in which rules score responses.

Runs as `python -m megarl.rewards.supervisor SOCKET PARENT`, started by a rank (`megarl.sandbox.pool`).
"""

from megarl.rewards.rules import Rules
from megarl.sandbox.supervisor import main

if __name__ == "__main__":
    main(kind=Rules)
