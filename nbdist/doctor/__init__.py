"""Environment checks, each with a verdict and a remedy."""
