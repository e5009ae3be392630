"""The engine: vLLM generates, and takes new weights in place. No other room imports vLLM."""
