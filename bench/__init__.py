"""Benchmarks, one script a question; ``python -m bench.forward``."""
