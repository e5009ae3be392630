"""The commands: what each accepts (`cli`), what each does first and last (`entry`), and the work itself."""
