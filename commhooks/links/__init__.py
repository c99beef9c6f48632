"""Bytes between two ranks: one interface, several kinds of link; no link knows a gradient, a tree or a priority rule."""
