"""Callbacks for PyTorch Lightning that survive, foresee and explain CUDA out of memory."""
