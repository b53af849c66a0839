"""Measurements: one runner, one list of cases shared with the tests and the tuner."""
