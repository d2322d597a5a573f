"""vLLM general plugin: the engine side of bitwise train-inference consistency."""
