"""Spoken by both sides; no torch, no IPython."""
