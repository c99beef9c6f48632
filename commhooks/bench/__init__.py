"""The benches: side by side with the peers in one run, every result checked before it is timed."""
