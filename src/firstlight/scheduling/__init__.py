"""Requests, plans, the scheduler, accounts of pages and slots, the prefix tree. Pure Python and numpy: no torch."""
