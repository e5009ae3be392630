"""How the ranks of a job start, find each other, exchange host data, stop, and notice a hang."""
