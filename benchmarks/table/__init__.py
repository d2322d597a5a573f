"""The README's tables, written from the result files between two markers."""
