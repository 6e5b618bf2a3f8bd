"""Predictions against published measurements, which nothing here is calibrated with.

`python -m benchmarks.accuracy` prints every point with its error, and fails where the mean is worse than the committed one.
"""
