"""Reads data files: parquet and JSON rows, tokenizers, chat templates, and the order of the rows."""
