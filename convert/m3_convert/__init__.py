"""Turns MiniMax-M3 checkpoints into GGUF files and compares the block selections of two models."""
