"""Programs that run one engine in a process of their own, each in the environment that has it."""
