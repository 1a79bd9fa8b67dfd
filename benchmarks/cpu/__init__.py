"""octavo on a CPU beside its peers, in one session: `python -m benchmarks.cpu`."""
