"""The engine: vLLM generates, and takes new weights in place. No other package imports vLLM."""

from megarl.platform.hiding import hide

# vLLM resamples sound with SciPy. The import takes seconds in every process.
hide("scipy", library="vllm")  # D197
