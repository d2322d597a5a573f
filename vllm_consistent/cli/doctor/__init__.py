"""The commands `doctor`, before a verl run, and `capture`, after a mismatch."""
