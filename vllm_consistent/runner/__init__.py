"""Sampling and scoring with one log-prob function, for both of vLLM's model runners."""
