"""Attention of few query rows in a program: two products with a softmax between them, as one kernel."""
