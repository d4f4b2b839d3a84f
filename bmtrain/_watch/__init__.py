"""Diagnosis of failures: the watchdog of every rank, its connection to rank 0, flight records, last words."""
