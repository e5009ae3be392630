"""The command line: what each command accepts, its help, and the completion of shells. Imports neither torch nor vLLM.

`table.py` has the table of all commands.
"""
