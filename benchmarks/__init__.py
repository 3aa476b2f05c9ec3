"""Benchmarks of gradient exchange: see README.md beside this file."""
