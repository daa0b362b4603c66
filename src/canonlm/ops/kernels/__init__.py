"""Triton kernels of the causal convolution and what surrounds it in a decoder; `api` is their only entrance.

Triton is imported when a kernel is first used, never before.
"""
