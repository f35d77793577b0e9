"""The library inside other systems: each subpackage is the only importer of its system."""
