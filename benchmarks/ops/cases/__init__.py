"""One file per op: `OP` and `cases(setting)`. Files are found by being here."""
