"""Records of a run: metrics and tables on the console, in files, and in experiment trackers."""
