"""REPORT: one record of what was known when memory ran out, and its renderings."""
