"""Runs in the notebook's kernel; never imports torch."""
