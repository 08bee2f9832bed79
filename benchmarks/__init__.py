"""Benchmarks: one file per question, each stating its estimate first. Run all with `make bench`."""
