"""Ready-made ways to run a consistent engine; besides the CLI the only code above the trainer."""
