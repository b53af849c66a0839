"""Epilogues, functions of accumulators: traced to an expression, simplified, shown, written as device text."""
