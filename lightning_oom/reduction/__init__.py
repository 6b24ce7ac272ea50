"""REDUCE: engines that lower the peak; each changes what it does not own and returns the undo."""
