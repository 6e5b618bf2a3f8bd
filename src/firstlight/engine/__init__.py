"""Runs a model: loads it, executes plans on a device, samples, and speaks with the API process."""
