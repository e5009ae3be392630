"""Makes and checks the data files of known tasks: `megarl prepare`."""
