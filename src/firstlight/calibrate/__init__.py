"""Measure the providers of every op that a model calls, on the device that is here, and write the table to choose by.

The model itself makes the calls: one layer of each kind, with weights, runs real steps under an observer, which checks each
provider against the op's reference on the very arguments of the call, and times those that pass.
"""
