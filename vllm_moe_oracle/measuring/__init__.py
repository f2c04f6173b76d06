"""Measuring: the timing of backends, tuning, benchmarks, and the worker processes that run them."""
