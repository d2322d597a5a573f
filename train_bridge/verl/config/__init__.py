"""Hydra configurations; `pkg://train_bridge.verl.config` is their search path."""
