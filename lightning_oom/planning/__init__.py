"""FORESEE: what a step will need, before it runs, and which settings make it fit."""
