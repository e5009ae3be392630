"""Triton kernels of the learner on CUDA, each beside the operations of torch that compute the same elsewhere.

Triton comes with torch for CUDA, and is imported only there.
"""
