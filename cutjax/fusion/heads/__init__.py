"""Heads of language models in a program: losses and gradients, computed without logits in memory."""
