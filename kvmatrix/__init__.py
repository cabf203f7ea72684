"""Qualification matrix for vLLM's CPU KV-offload lookup."""

__version__ = "0.1.0"
