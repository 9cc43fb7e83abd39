"""Builds pairs of real container images, an older and a newer version of the same software."""
