"""Firstlight's models inside other engines: one core, and a thin adapter for each host."""
