"""Faults put into the library on purpose, each of which a test must find: `make mutants`."""
