"""The report of a run for people: reads the files of a run, judges them, and writes one page that needs no network."""
