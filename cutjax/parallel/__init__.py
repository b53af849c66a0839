"""Algorithms over devices: rows that travel, the products beside them, and rows sent to the devices of experts."""
