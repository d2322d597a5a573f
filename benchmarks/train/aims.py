"""What a training step is meant to reach; apart, since the README's table needs no model."""

TIME_AIM, MEMORY_AIM = 1.10, 1.05
"""Ratios to stock, at most."""
