"""Products: what is multiplied, their primitives and rules, their derivatives with an epilogue, and chains of two."""
