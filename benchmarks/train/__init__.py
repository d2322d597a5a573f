"""Training speed and peak memory: the bridged model against the stock Hugging Face model."""
