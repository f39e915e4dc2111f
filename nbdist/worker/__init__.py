"""Runs in every rank."""
