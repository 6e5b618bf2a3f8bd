"""Firstlight: run, verify and predict large language models from one model description."""
