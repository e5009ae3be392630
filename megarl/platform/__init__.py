"""Dealings with the operating system: devices, processes, files, remote file systems, and secrets."""
