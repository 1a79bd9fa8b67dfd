"""One small adapter for each engine: where it is found, what it can run, the commands, how their output is read."""
