"""The parts of `python -m onepass optimize`: load a model file, verify, measure, report."""
