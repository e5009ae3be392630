"""Makes and checks the data files of known tasks: `python -m megarl.data.prepare`."""
