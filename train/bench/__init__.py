"""Benchmarks: time and memory of a step against the models of transformers.

What belongs here: measurements of speed, and the checks that make them comparable.
Not here: measurements of quality (`train.analysis`).
"""
