"""Triton kernels of the learner on CUDA. On the CPU, operations of torch compute the same.

Triton comes with torch for CUDA, and is imported only there.
"""
